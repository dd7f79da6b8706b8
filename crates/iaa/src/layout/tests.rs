//! The layout compared with the kernel's header.

use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use super::{Descriptor, Record, flag, opcode, status};

const HEADER: &str = "/usr/include/linux/idxd.h";

/// Lines of C that do not compile unless the header agrees.
fn comparison() -> String {
    let mut text = String::from("#include <stddef.h>\n#include <linux/idxd.h>\n");
    let mut same = |of: &str, ours: usize| {
        writeln!(text, "_Static_assert({of} == {ours}, \"{of}\");").expect("a string has room");
    };
    same("sizeof(struct iax_hw_desc)", size_of::<Descriptor>());
    same("sizeof(struct iax_completion_record)", size_of::<Record>());
    for (field, ours) in [
        ("completion_addr", offset_of!(Descriptor, record)),
        ("src1_addr", offset_of!(Descriptor, source)),
        ("dst_addr", offset_of!(Descriptor, dest)),
        ("src1_size", offset_of!(Descriptor, source_bytes)),
        ("int_handle", offset_of!(Descriptor, interrupt)),
        ("compr_flags", offset_of!(Descriptor, codec_flags)),
        ("decompr_flags", offset_of!(Descriptor, codec_flags)),
        ("src2_addr", offset_of!(Descriptor, aecs)),
        ("max_dst_size", offset_of!(Descriptor, dest_bytes_max)),
        ("src2_size", offset_of!(Descriptor, aecs_bytes)),
        ("filter_flags", offset_of!(Descriptor, filter_flags)),
        ("num_inputs", offset_of!(Descriptor, inputs)),
    ] {
        same(&format!("offsetof(struct iax_hw_desc, {field})"), ours);
    }
    for (field, ours) in [
        ("status", offset_of!(Record, status)),
        ("error_code", offset_of!(Record, error)),
        ("bytes_completed", offset_of!(Record, bytes_completed)),
        ("fault_addr", offset_of!(Record, fault_address)),
        ("invalid_flags", offset_of!(Record, invalid_flags)),
        ("output_size", offset_of!(Record, output_bytes)),
        ("output_bits", offset_of!(Record, output_bits)),
        ("xor_csum", offset_of!(Record, xor)),
        ("crc", offset_of!(Record, crc)),
        ("min", offset_of!(Record, min)),
        ("max", offset_of!(Record, max)),
        ("sum", offset_of!(Record, sum)),
    ] {
        same(&format!("offsetof(struct iax_completion_record, {field})"), ours);
    }
    for (name, ours) in [
        ("IDXD_OP_FLAG_BOF", flag::BLOCK_ON_FAULT),
        ("IDXD_OP_FLAG_CRAV", flag::RECORD_VALID),
        ("IDXD_OP_FLAG_RCR", flag::RECORD_WANTED),
        ("IDXD_OP_FLAG_CC", flag::CACHE),
        ("IDXD_OP_FLAG_RD_SRC2_AECS", flag::READ_AECS),
    ] {
        same(name, usize::try_from(ours).expect("32 bits"));
    }
    for (name, ours) in [
        ("IAX_OPCODE_NOOP", opcode::NOOP),
        ("IAX_OPCODE_DECOMPRESS", opcode::DECOMPRESS),
        ("IAX_OPCODE_COMPRESS", opcode::COMPRESS),
        ("DSA_COMP_STATUS_MASK", status::MASK),
        ("DSA_COMP_STATUS_WRITE", status::WRITE),
        ("DSA_COMP_PAGE_FAULT_NOBOF", status::PAGE_FAULT_NO_BLOCK),
        ("IAX_COMP_SUCCESS", status::SUCCESS),
        ("IAX_COMP_PAGE_FAULT_IR", status::PAGE_FAULT),
        ("IAX_COMP_ANALYTICS_ERROR", status::ANALYTICS_ERROR),
        ("IAX_COMP_OUTBUF_OVERFLOW", status::OUTPUT_OVERFLOW),
        ("IAX_COMP_BAD_OPCODE", status::BAD_OPCODE),
        ("IAX_COMP_OVERLAP_BUFFERS", status::OVERLAPPING),
        ("IAX_COMP_INT_HANDLE_INVAL", status::INVALID_INTERRUPT),
        ("IAX_COMP_PFAULT_RDBA", status::RECORD_PAGE_FAULT),
        ("IAX_COMP_HW_ERR1", status::HARDWARE),
        ("IAX_COMP_WATCHDOG", status::WATCHDOG),
        ("IAX_COMP_INVALID_COMP_FLAG", status::INVALID_CODEC_FLAGS),
        ("IAX_COMP_INVALID_INVERT_OUT", status::INVALID_INVERSION),
    ] {
        same(name, ours.into());
    }
    text
}

/// The same for fields of bits, which have no offset. Each is filled with ones, and an optimising compiler knows which
/// bits of the structure that sets. It refuses the call of a function that is declared to be an error, unless the
/// comparison before it is false at compile time.
fn comparison_of_bits() -> String {
    let ones = Descriptor { pasid: u32::MAX, flags_opcode: u32::MAX, ..Descriptor::default() };
    let opcode = u32::from(ones.opcode()) << 24;
    // Field, which 32-bit word of the structure it is in, and its bits there.
    let fields = [
        ("pasid", offset_of!(Descriptor, pasid) / 4, 0x000F_FFFF),
        ("rsvd", offset_of!(Descriptor, pasid) / 4, 0x7FF0_0000),
        ("priv", offset_of!(Descriptor, pasid) / 4, 0x8000_0000),
        ("flags", offset_of!(Descriptor, flags_opcode) / 4, ones.flags()),
        ("opcode", offset_of!(Descriptor, flags_opcode) / 4, opcode),
    ];
    bits(&fields)
}

/// A program that compiles if each field of the descriptor has these bits of this word, and no others.
fn bits(fields: &[(&str, usize, u32)]) -> String {
    let mut text = String::from(
        "#include <linux/idxd.h>\n\
         extern void differs(void) __attribute__((error(\"a field of bits differs\")));\n\
         union both { struct iax_hw_desc desc; uint32_t words[16]; };\n",
    );
    for (field, word, mask) in fields {
        writeln!(
            text,
            "void check_{field}(void) {{\n\
             union both it = {{ .words = {{ 0 }} }};\n\
             it.desc.{field} = ~0u;\n\
             if (it.words[{word}] != {mask}u || it.words[{other}] != 0) differs();\n}}",
            other = 1 - word,
        )
        .expect("a string has room");
    }
    text
}

/// What a C compiler says against `text`; `None` if there is no compiler.
fn compiles(text: &str) -> Option<Result<(), String>> {
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-std=c11", "-O2", "-S", "-o", "/dev/null", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    let mut input = compiler.stdin.take().expect("it is piped");
    input.write_all(text.as_bytes()).expect("the compiler reads");
    drop(input);
    let output = compiler.wait_with_output().expect("it ends");
    if output.status.success() {
        Some(Ok(()))
    } else {
        Some(Err(String::from_utf8_lossy(&output.stderr).into()))
    }
}

/// Goal: sizes, offsets and numbers are the kernel's. Method: assertions of C, compiled with the header of this
/// machine; and some that are wrong, which must not compile.
#[test]
fn layout_is_that_of_the_kernels_header() {
    if !std::fs::exists(HEADER).expect("its directory can be searched") {
        println!("SKIPPED: {HEADER} is missing (Debian: linux-libc-dev)");
        return;
    }
    let Some(is_same) = compiles(&comparison()) else {
        println!("SKIPPED: there is no C compiler (Debian: gcc)");
        return;
    };
    assert_eq!(is_same, Ok(()), "the header of this machine has another layout");
    let wrong = "#include <linux/idxd.h>\n_Static_assert(IAX_OPCODE_COMPRESS == 1, \"\");\n";
    assert!(compiles(wrong).is_some_and(|said| said.is_err()), "the comparison compares nothing");
    let is_same = compiles(&comparison_of_bits());
    assert_eq!(is_same, Some(Ok(())), "the header of this machine has other fields of bits");
    for wrong in [("opcode", 1, 0x7F00_0000), ("opcode", 0, 0xFF00_0000), ("priv", 0, 0xC000_0000)]
    {
        let said = compiles(&bits(&[wrong]));
        assert!(
            said.is_some_and(|said| said.is_err()),
            "{wrong:?}: the comparison compares nothing"
        );
    }
}
