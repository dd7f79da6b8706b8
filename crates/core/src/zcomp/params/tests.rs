//! Tests of how parameters are read and printed.

use super::{Algorithm, Choice, Params};
use crate::page::UnitOrder;
use crate::zcomp::Zcomp;

/// Goal: printed parameters are read back; an error for a bad one names it, and what is accepted.
#[test]
fn parameters_are_read_and_refused() {
    for given in [
        "lz4",
        "lzo",
        "lzo-rle",
        "zstd",
        "deflate",
        "lz4,level=65537",
        "lzo-rle,level=1",
        "zstd,level=-7",
        "deflate,level=12",
        "842",
        "842,level=1",
        "deflate,window=9",
        "deflate,level=9,window=15,dict=/a/b=c",
        "lz4hc,level=4,dict=d",
    ] {
        let params: Params = given.parse().expect(given);
        assert_eq!(params.to_string(), given);
    }
    let zstd = Params { level: Some(3), ..Algorithm::Zstd.into() };
    assert_eq!("zstd,level=3".parse(), Ok(zstd));
    let (names, levels) = (
        "accepted: lz4, lz4hc, lzo, lzo-rle, zstd, deflate, 842",
        "accepted: -131072 to 22 (default 1)",
    );
    let all = "accepted: level=N from -131072 to 22 (default 1), dict=FILE";
    for (given, told, accepted) in [
        ("", "unknown algorithm ''", names),
        ("ZSTD", "unknown algorithm 'ZSTD'", names),
        ("lzo_rle,level=1", "unknown algorithm 'lzo_rle'", names),
        ("lzo,level=2", "lzo has no level '2'", "accepted: 1 to 1 (default 1)"),
        ("zstd,level=23", "zstd has no level '23'", levels),
        ("zstd,level=", "zstd has no level ''", levels),
        ("zstd,level=1,level=2", "zstd has parameter 'level' twice", "accepted: each once"),
        ("zstd,dict=a,dict=a", "zstd has parameter 'dict' twice", "accepted: each once"),
        ("deflate,window=8", "deflate has no window '8'", "accepted: 9 to 15 (default 15)"),
        ("deflate,window=300", "deflate has no window '300'", "accepted: 9 to 15 (default 15)"),
        ("zstd,window=12", "zstd has no parameter 'window=12'", all),
        ("zstd,dict=", "zstd has no parameter 'dict='", all),
        ("zstd,dict", "zstd has no parameter 'dict'", all),
        ("zstd,Level=3", "zstd has no parameter 'Level=3'", all),
        ("deflate,level=12,dict=a", "deflate has no level '12'", "accepted: 1 to 9 (default 1)"),
        ("deflate,dict=a,level=12", "deflate has no level '12'", "accepted: 1 to 9 (default 1)"),
        ("lz4,level=0", "lz4 has no level '0'", "accepted: 1 to 65537 (default 1)"),
        ("deflate,level=x", "deflate has no level 'x'", "accepted: 1 to 12 (default 1)"),
        ("zstd,", "zstd has no parameter ''", all),
        (
            "lz4,d=x",
            "lz4 has no parameter 'd=x'",
            "accepted: level=N from 1 to 65537 (default 1), dict=FILE",
        ),
    ] {
        let error = given.parse::<Params>().expect_err(given);
        assert_eq!(error.to_string(), format!("{told}; {accepted}"));
    }
    let any_order: Params = "deflate,dict=d,window=12,level=6".parse().expect("in any order");
    assert_eq!(any_order.to_string(), "deflate,level=6,window=12,dict=d");
    let error = Zcomp::new(any_order, UnitOrder::DEFAULT, 1).expect_err("not read");
    assert_eq!(error.to_string(), "dictionary 'd': it was not read");
    let unchecked = Params { level: Some(13), ..Algorithm::Deflate.into() };
    let error = Zcomp::new(unchecked, UnitOrder::DEFAULT, 1).expect_err("13 is out of range");
    assert_eq!(error.to_string(), "deflate has no level '13'; accepted: 1 to 12 (default 1)");
}

#[test]
fn the_default_is_a_choice_of_two() {
    let choice = Choice::default();
    assert_eq!(crate::zcomp::ALGORITHM_DEFAULT.parse(), Ok(choice.clone()));
    assert_eq!(choice.to_string(), crate::zcomp::ALGORITHM_DEFAULT);
    assert_eq!(choice.codecs(), [Algorithm::Lz4.into(), Algorithm::Zstd.into()]);
}

#[test]
fn a_choice_is_one_algorithm_or_auto() {
    let zstd = Params { level: Some(3), ..Algorithm::Zstd.into() };
    assert_eq!("zstd,level=3".parse(), Ok(Choice::Fixed(zstd.clone())));
    assert_eq!(Choice::Fixed(zstd).to_string(), "zstd,level=3");
    let error = "auto,level=1".parse::<Choice>().expect_err("it has no level");
    let names = "accepted: auto, lz4, lz4hc, lzo, lzo-rle, zstd, deflate, 842";
    assert_eq!(error.to_string(), format!("unknown algorithm 'auto,level=1'; {names}"));
}
