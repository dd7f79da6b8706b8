//! Every order of steps of two processes at one bucket: `make loom`.

use loom::sync::Arc;
use loom::thread;

use super::{Bucket, Period, WriteBudget};

const SECOND_NS: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;

/// When the bucket is filled for the first time.
const START_NS: u64 = 7 * SECOND_NS;

/// In this time a MiB comes.
const MIB_NS: u64 = SECOND_NS / 16;

fn budget(bytes: u64, period: Period) -> WriteBudget {
    WriteBudget::new(bytes, period).expect("more than a slot")
}

/// A bucket of 16 MiB a second, of which so many bytes are left at the start.
fn bucket(left: u64) -> Arc<Bucket> {
    let bucket = Bucket::default();
    bucket.set(budget(16 * MIB, Period::Second));
    assert_eq!(bucket.left(0, START_NS, || ()), 16 * MIB);
    bucket.take(16 * MIB - left);
    Arc::new(bucket)
}

/// Runs `other` on a thread beside `mine`, and returns what both have.
fn beside<A: 'static, B>(
    bucket: &Arc<Bucket>,
    other: impl FnOnce(&Bucket) -> A + 'static,
    mine: impl FnOnce(&Bucket) -> B,
) -> (A, B) {
    let others = {
        let bucket = Arc::clone(bucket);
        thread::spawn(move || other(&bucket))
    };
    let mine = mine(bucket);
    (others.join().expect("nothing panics"), mine)
}

/// Goal: what comes in a time comes once, whoever fills, and nothing that was written meanwhile is forgotten. Method:
/// both look after the time of a MiB, and both write; then what is left is known to the byte.
#[test]
fn loom_no_byte_comes_twice_and_none_is_lost() {
    loom::model(|| {
        let bucket = bucket(2 * MIB);
        let now = START_NS + MIB_NS;
        let step = move |bucket: &Bucket, bytes| {
            let left = bucket.left(0, now, || panic!("it is not used up"));
            bucket.take(bytes);
            left
        };
        let (others, mine) = beside(
            &bucket,
            move |bucket| step(bucket, 3 * 4096),
            move |bucket| step(bucket, 5 * 4096),
        );
        assert!(others.max(mine) <= 3 * MIB, "no more than there is");
        assert_eq!(bucket.left(0, now, || ()), 3 * MIB - 8 * 4096);
    });
}

/// Goal: an empty bucket is used up once, however many see it, and is used again once enough has come. Method: one
/// process looks at it empty, the other too, or a MiB later.
#[test]
fn loom_a_bucket_is_used_up_once() {
    for later in [0, MIB_NS] {
        loom::model(move || {
            let bucket = bucket(0);
            let look = |bucket: &Bucket, now| {
                let mut told = 0;
                bucket.left(0, now, || told += 1);
                told
            };
            let (others, mine) = beside(
                &bucket,
                move |bucket| look(bucket, START_NS + later),
                move |bucket| look(bucket, START_NS),
            );
            assert_eq!(bucket.used_up(), others + mine, "each is told once");
            assert!(bucket.used_up() <= 1 && (later > 0 || bucket.used_up() == 1));
            assert_eq!(bucket.left(0, START_NS + MIB_NS, || panic!("a MiB has come")), MIB);
        });
    }
}

/// Goal: another budget is full, whoever fills the bucket meanwhile as the old budget says, and what was used up is
/// counted once. Method: the old budget is smaller, and used up; nothing ever comes to the new one.
#[test]
fn loom_another_budget_is_full() {
    loom::model(|| {
        let bucket = bucket(0);
        bucket.left(0, START_NS, || ());
        assert_eq!(bucket.used_up(), 1);
        beside(
            &bucket,
            |bucket| bucket.left(0, START_NS + MIB_NS / 64, || ()),
            |bucket| bucket.set(budget(100 * MIB, Period::Run)),
        );
        // What has come to the old budget may be there too.
        let left = bucket.left(0, START_NS + SECOND_NS, || panic!("it is full"));
        assert!((100 * MIB..=100 * MIB + MIB / 64).contains(&left), "{left} bytes are left");
        assert_eq!(bucket.used_up(), 1);
    });
}

/// Goal: whoever sees the first budget finds it full.
#[test]
fn loom_the_first_budget_is_full() {
    loom::model(|| {
        let bucket = Arc::new(Bucket::default());
        let (left, ()) = beside(
            &bucket,
            |bucket| bucket.left(0, START_NS, || panic!("nothing was written")),
            |bucket| bucket.set(budget(100 * MIB, Period::Run)),
        );
        assert!([100 * MIB, u64::MAX].contains(&left), "{left} bytes are left");
        assert_eq!((bucket.left(0, START_NS, || ()), bucket.used_up()), (100 * MIB, 0));
    });
}
