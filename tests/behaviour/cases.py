"""The programs of tests/behaviour, and the cases that each of them has."""

PROGRAMS = ["allocator", "mappings", "forks", "threads", "signals", "transfer", "descriptors", "ends", "resident",
            "own_malloc", "modules", "sandbox", "trees", "idle", "no_uring", "no_direct", "spilled", "faulty_calls"]
# Libraries that the programs load, or that are preloaded, and their options for the linker.
LIBRARIES = [("module", "module.so", []), ("outer", "outer.so", ["-Wl,-rpath,$ORIGIN/by_runpath"]),
             ("module", "by_runpath/only_by_runpath.so", []), ("module", "by_runpath/only_by_runpath_too.so", []),
             ("clock", "clock.so", ["-pthread"])]

# Name, limit in MiB, algorithm, unit. Every unit and both algorithms occur with every kind of change.
CASES = [
    ("allocator single", 32, "lz4", "64K"),
    ("allocator threads", 48, "zstd", "64K"),
    ("allocator threads", 64, "lz4", "2M"),
    ("allocator handed_over", 32, "lz4", "4K"),
    ("allocator small_pages", 32, "lz4", "4K"),
    ("allocator grown", 32, "lz4", "4K"),
    ("allocator grown", 32, "zstd", "64K"),
    ("allocator grown", 64, "lz4", "1M"),
    ("mappings single", 32, "lz4", "4K"),
    ("mappings single", 32, "zstd", "64K"),
    ("mappings single", 64, "lz4", "2M"),
    ("mappings threads", 32, "lz4", "64K"),
    ("mappings threads", 32, "lz4", "4K"),
    ("mappings neighbours", 32, "lz4", "64K"),
    ("mappings neighbours", 32, "lz4", "4K"),
    ("mappings file_over", 32, "lz4", "64K"),
    ("mappings holes", 32, "lz4", "64K"),
    ("mappings moves", 32, "lz4", "64K"),
    ("mappings moves", 64, "lz4", "2M"),
    ("mappings shared_moves", 32, "lz4", "64K"),
    ("mappings raw_calls", 32, "lz4", "64K"),
    ("mappings raw_calls", 32, "lz4", "16K"),
    ("mappings raw_drops", 32, "lz4", "4K"),
    ("mappings raw_drops", 32, "lz4", "16K"),
    ("mappings raw_drops", 32, "lz4", "64K"),
    ("mappings raw_frees", 32, "lz4", "16K"),
    ("mappings raw_frees", 32, "lz4", "64K"),
    ("mappings raw_grows", 32, "lz4", "16K"),
    ("mappings raw_grows", 32, "lz4", "64K"),
    ("mappings raw_moves", 32, "lz4", "16K"),
    ("mappings raw_replaces", 32, "lz4", "4K"),
    ("mappings raw_replaces", 32, "zstd", "64K"),
    ("mappings refixed", 32, "lz4", "16K"),
    ("mappings guards", 32, "lz4", "16K"),
    ("mappings noreplace", 32, "lz4", "16K"),
    ("mappings half_dropped", 32, "lz4", "16K"),
    ("mappings half_dropped", 32, "lz4", "64K"),
    ("mappings read_only", 32, "lz4", "1M"),
    ("signals jumps", 32, "lz4", "16K"),
    ("descriptors none", 32, "lz4", "16K"),
    ("mappings raw_moves", 32, "lz4", "64K"),
    ("mappings raw_returns", 32, "lz4", "16K"),
    ("mappings half_moves", 32, "lz4", "16K"),
    ("mappings given_up_moves", 32, "lz4", "16K"),
    ("mappings grows", 32, "lz4", "4K"),
    ("mappings grows", 32, "zstd", "16K"),
    ("mappings beside_a_file", 32, "lz4", "16K"),
    ("mappings beside_a_file", 32, "zstd", "64K"),
    ("mappings grows", 64, "lz4", "1M"),
    ("mappings shm_over", 32, "lz4", "16K"),
    ("mappings populate", 32, "lz4", "64K"),
    ("mappings beyond", 32, "lz4", "16K"),
    ("mappings keys", 32, "lz4", "16K"),
    ("mappings keys", 32, "lz4", "64K"),
    ("mappings pieces", 32, "lz4", "4K"),
    ("mappings pieces", 32, "lz4", "16K"),
    ("mappings pieces", 32, "zstd", "64K"),
    ("mappings pieces", 48, "lz4", "1M"),
    ("mappings pieces_threads", 32, "lz4", "16K"),
    ("mappings pieces_threads", 32, "lz4", "64K"),
    ("trees own", 64, "lz4", "16K"),
    ("forks verified", 32, "lz4", "64K"),
    ("forks clones", 32, "lz4", "64K"),
    ("forks clones", 32, "lz4", "4K"),
    ("forks plain_syscalls", 32, "lz4", "16K"),
    ("forks no_room", 32, "lz4", "16K"),
    ("forks no_room", 32, "lz4", "64K"),
    ("forks wiped", 32, "lz4", "16K"),
    ("forks not_inherited", 32, "lz4", "16K"),
    ("forks no_threads", 32, "lz4", "16K"),
    ("forks no_threads", 32, "zstd", "64K"),
    ("forks no_userfaultfd", 32, "lz4", "16K"),
    ("forks no_files", 32, "lz4", "16K"),
    ("forks few_threads", 32, "lz4", "4K"),
    ("forks nested", 64, "lz4", "2M"),
    ("forks own_stacks", 32, "lz4", "64K"),
    ("forks exec_chain", 32, "lz4", "64K"),
    ("forks exec_races", 32, "lz4", "64K"),
    ("forks nested", 32, "lz4", "64K"),
    ("forks nested", 32, "lz4", "4K"),
    ("forks threads", 48, "lz4", "64K"),
    ("forks threads_exec", 48, "lz4", "64K"),
    ("forks loop", 32, "lz4", "64K"),
    ("forks others", 32, "zstd", "64K"),
    ("forks stack", 32, "lz4", "4K"),
    ("forks files", 32, "lz4", "64K"),
    ("forks server", 48, "lz4", "64K"),
    ("forks busy_threads", 32, "lz4", "4K"),
    ("forks streams", 32, "lz4", "16K"),
    ("forks names", 32, "lz4", "4K"),
    ("forks names", 32, "lz4", "16K"),
    ("forks handlers", 32, "lz4", "16K"),
    ("forks modules", 32, "lz4", "4K"),
    ("forks modules", 32, "lz4", "16K"),
    # An accelerator: a child of `fork` has queues of its own, or software where it is not managed.
    ("mappings neighbours", 32, "deflate-iaa", "4K"),
    ("mappings threads", 32, "deflate-iaa-dynamic", "4K"),
    ("forks verified", 32, "deflate-iaa", "4K"),
    ("forks verified", 32, "deflate-iaa", "64K"),
    ("forks nested", 32, "deflate-iaa", "64K"),
    ("forks threads", 48, "deflate-iaa", "16K"),
    ("forks no_userfaultfd", 32, "deflate-iaa", "4K"),
    ("forks no_threads", 32, "deflate-iaa", "4K"),
    ("descriptors none", 32, "deflate-iaa", "4K"),
    ("threads come_and_go", 32, "lz4", "64K"),
    ("threads own_stacks", 32, "lz4", "64K"),
    ("threads own_stacks", 32, "lz4", "4K"),
    ("threads contexts", 32, "lz4", "4K"),
    ("threads modules", 32, "lz4", "64K"),
    ("threads locks", 32, "lz4", "64K"),
    ("threads robust", 32, "lz4", "4K"),
    ("threads robust_shared", 32, "lz4", "16K"),
    ("threads cleared_words", 32, "lz4", "16K"),
    ("threads shared_locks", 32, "lz4", "64K"),
    ("threads leader_leaves", 32, "lz4", "64K"),
    ("threads leader_leaves_late", 32, "lz4", "64K"),
    ("threads all_leave", 32, "lz4", "64K"),
    ("threads identities", 32, "lz4", "64K"),
    ("threads nobody_forks", 32, "lz4", "64K"),
    ("threads nobody_grows", 32, "lz4", "64K"),
    ("threads real_time", 32, "lz4", "16K"),
    ("signals faults", 32, "lz4", "64K"),
    ("signals timers", 48, "lz4", "64K"),
    ("signals alternate", 32, "lz4", "4K"),
    ("transfer calls", 32, "lz4", "64K"),
    ("transfer calls", 32, "zstd", "4K"),
    ("transfer pipe_write", 32, "lz4", "64K"),
    ("transfer socket_write", 32, "lz4", "64K"),
    ("transfer pipe_splice", 32, "lz4", "64K"),
    ("transfer splice_kept", 32, "lz4", "64K"),
    ("transfer zerocopy", 32, "lz4", "64K"),
    ("transfer direct", 32, "lz4", "64K"),
    ("transfer direct", 64, "lz4", "2M"),
    ("transfer direct_threads", 32, "lz4", "4K"),
    ("transfer direct_threads", 32, "zstd", "16K"),
    ("transfer direct_threads", 32, "lz4", "64K"),
    ("transfer direct_threads", 64, "lz4", "2M"),
    ("transfer uring", 32, "lz4", "64K"),
    ("transfer outside", 32, "lz4", "64K"),
    ("transfer pins", 32, "lz4", "4K"),
    ("transfer locked", 32, "lz4", "64K"),
    ("transfer cut_off", 48, "lz4", "4K"),
    ("descriptors range", 32, "lz4", "64K"),
    ("descriptors loop", 32, "lz4", "64K"),
    ("descriptors from", 32, "lz4", "64K"),
    ("descriptors dup_over", 32, "lz4", "64K"),
    ("descriptors few", 32, "lz4", "64K"),
    ("descriptors few_later", 32, "lz4", "64K"),
    ("descriptors ends", 32, "lz4", "64K"),
    ("descriptors lowest", 32, "lz4", "64K"),
    ("own_malloc blocks", 48, "lz4", "64K"),
    ("own_malloc children", 48, "lz4", "16K"),
    ("own_malloc own_handlers", 48, "lz4", "16K"),
    ("modules deep", 32, "lz4", "64K"),
    ("modules by_caller", 32, "lz4", "64K"),
    ("sandbox early", 32, "lz4", "64K"),
    ("sandbox trapped", 32, "lz4", "64K"),
    ("sandbox late", 32, "lz4", "64K"),
    ("sandbox late_copies", 32, "lz4", "64K"),
    ("sandbox forked", 32, "lz4", "64K"),
    ("sandbox blind", 32, "lz4", "64K"),
]

# With memory that does not compress, so that zfolio spills it. All cases can be run so: --noise.
NOISE = [
    ("allocator threads", 48, "zstd", "64K"),
    ("allocator handed_over", 32, "lz4", "4K"),
    ("mappings single", 32, "lz4", "4K"),
    ("mappings threads", 32, "lz4", "64K"),
    ("mappings shared_moves", 32, "lz4", "64K"),
    ("mappings raw_drops", 32, "lz4", "16K"),
    ("mappings beyond", 32, "lz4", "16K"),
    ("mappings pieces_threads", 32, "lz4", "16K"),
    ("forks verified", 32, "lz4", "64K"),
    ("forks plain_syscalls", 32, "lz4", "16K"),
    ("forks no_threads", 32, "lz4", "16K"),
    ("forks nested", 32, "lz4", "64K"),
    ("forks threads", 48, "lz4", "64K"),
    ("forks loop", 32, "lz4", "64K"),
    ("forks files", 32, "lz4", "64K"),
    ("forks busy_threads", 32, "lz4", "4K"),
    ("forks names", 32, "lz4", "16K"),
    ("threads come_and_go", 32, "lz4", "64K"),
    ("threads identities", 32, "lz4", "64K"),
    ("threads nobody_forks", 32, "lz4", "64K"),
    ("transfer calls", 32, "zstd", "4K"),
    ("transfer direct_threads", 32, "lz4", "64K"),
    ("transfer uring", 32, "lz4", "64K"),
    ("descriptors range", 32, "lz4", "64K"),
    ("descriptors few", 32, "lz4", "64K"),
    ("descriptors few_later", 32, "lz4", "64K"),
    ("sandbox trapped", 32, "lz4", "64K"),
    ("trees own", 64, "lz4", "16K"),
]

# Cases in which zfolio must print nothing.
SILENT = ["forks exec_races"]
# Cases in which zfolio must print these words.
TOLD = {"forks no_threads": "the limit is not held", "forks no_userfaultfd": "the limit is not held",
        "forks no_files": "the limit is not held", "sandbox forked": "the limit is not held in a child",
        "forks few_threads": "the limit is not held"}
# Cases that zfolio must end with status 125 and a line with these words.
STOPPED = {"sandbox late": "seccomp", "sandbox late_copies": "seccomp"}

# The memory of these is sampled from outside.
SAMPLED = [
    ("resident fast", 64, "lz4", "64K"),
    ("resident fast", 64, "lz4", "2M"),
    ("resident fresh", 64, "lz4", "64K"),
    ("resident sparse", 48, "lz4", "64K"),
    ("resident sparse", 48, "lz4", "4K"),
    ("resident burst", 64, "zstd", "64K"),
    ("resident blocks", 64, "lz4", "64K"),
    ("resident populated", 48, "lz4", "64K"),
    ("resident files", 64, "lz4", "16K"),
]

# These may be over their limit at the start, which is printed; at the end they must be below it. read_zeros is over it
# for as long as it fills pages that it has read before sooner than they are taken out (docs/limits.md).
MEASURED = [
    ("mappings read_zeros", 48, "lz4", "16K"),
    ("resident start", 64, "lz4", "64K"),
    ("resident start", 64, "lz4", "2M"),
    ("mappings read_only", 48, "lz4", "16K"),
    ("mappings small", 48, "lz4", "4K"),
    ("mappings small", 48, "lz4", "64K"),
    ("mappings pieces_return", 48, "lz4", "16K"),
    ("mappings pieces_return", 48, "lz4", "64K"),
]

# The memory of all processes of these together is sampled from outside. They may pass the limit while processes start
# or fork: half of the samples must be below it.
TREES = [
    ("trees eight", 192, "lz4", "16K"),
    ("trees killed", 128, "lz4", "16K"),
    ("trees idle", 128, "lz4", "16K"),
    ("trees eight", 192, "zstd", "16K"),
    ("trees forked", 128, "lz4", "16K"),
    ("trees shared", 96, "lz4", "16K"),
    ("trees full", 768, "lz4", "16K"),
]


def is_per_process(name, unit):
    """Whether a case runs with --per-process: other code holds the limit then, so those in units of 16K test it.

    The cases of `trees` are about the limit that processes share, but for one.
    """
    return name == "trees own" or unit == "16K" and "trees" not in name


def accelerator(algorithm, unit):
    """What `--accelerate` names in a case: the modelled device has an algorithm of its own; workers have something to
    do with units of 64K, whatever the algorithm."""
    if algorithm.startswith("deflate-iaa"):
        return "iaa=model" if unit == "4K" else "iaa=model,verify_compress=1,distribute_decomps=1"
    return "cpu=3" if unit == "64K" else None


# MiB of a program that uses a tenth of them; options of `zfolio run`; what `zfolio set` asks of it, or of its run; how
# many MiB it is to have left.
IDLE = [
    ("idle stall", 160, ["--limit", "1G", "--stall", "20%"], [], 60),
    ("idle stall of a small part of the limit", 160, ["--limit", "8G", "--stall", "20%"], [], 60),
    ("idle stall after a fork", 160, ["--limit", "1G", "--stall", "20%"], [], 60),
    ("idle stall per process", 160, ["--limit", "1G", "--per-process", "--stall", "20%"], [], 60),
    ("idle stall below a small limit", 80, ["--limit", "40M", "--stall", "0.01%"], [], 42),
    ("idle set stall", 160, ["--limit", "256M"], ["stall=20%"], 60),
    ("idle set limit", 160, ["--limit", "256M"], ["limit=64M"], 64),
    ("idle set limit of a run", 160, ["--limit", "256M"], ["run", "limit=64M", "stall=1%"], 64),
    ("idle set limit of a process", 160, ["--limit", "256M", "--per-process"], ["limit=64M"], 64),
    ("idle set limit of each process", 160, ["--limit", "256M", "--per-process"],
     ["run", "limit=64M", "stall=1%"], 64),
]
# Arguments, and the words that the one line on standard error must contain.
REFUSED = [
    (["--algorithm", "lz5"], "lz5"),
    (["--algorithm", "zstd,level=99"], "level"),
    (["--algorithm", "zstd,level=x"], "level"),
    (["--unit", "5000"], "unit"),
    (["--unit", "2K"], "unit"),
    (["--unit", "4M"], "unit"),
    (["--limit", "1M"], "limit"),
    (["--limit", "lots"], "limit"),
    (["--limit", ""], "limit"),
    (["--limit=-5M"], "limit"),
    (["--stall", "1"], "stall"),
    (["--stall", "90%"], "stall"),
    (["--stats", "/nowhere/at/all"], "stats"),
    (["--nonsense"], "nonsense"),
]
