//! Any bytes at all.

use zfolio_core::testing::{Random, seed};

use crate::vhost_user::script::{play, play_messages, play_requests};

/// Goal: no script breaks a rule, and scripts reach requests that are carried out. Method: random bytes.
#[test]
fn any_descriptors_do_no_harm() {
    let seed = seed();
    let mut random = Random::new(seed);
    let mut done = 0;
    for _ in 0..300 {
        let length = 100 + random.below(4000);
        let (chosen, script) = (random.byte(), random.bytes(length));
        done += play_requests(chosen, &script);
    }
    assert!(done > 300, "seed {seed}: only {done} requests were answered");
    play(&[]);
}

/// Bytes of a message: its number, flags (version 1), length, body.
fn message(number: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    [number, flags, length]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .chain(body.iter().copied())
        .collect()
}

/// Goal: no message ends more than its connection. Method: each message of the protocol with bodies of many lengths,
/// true and false, alone and behind a negotiation; then noise.
#[test]
fn any_messages_do_no_harm() {
    let seed = seed();
    let mut random = Random::new(seed);
    let negotiation = [
        message(3, 1, &[]),
        message(1, 1, &[]),
        message(15, 1, &[]),
        message(16, 1, &0x209_u64.to_le_bytes()),
        message(2, 1, &(1_u64 << 30 | 1 << 32).to_le_bytes()),
    ]
    .concat();
    for number in 0..50 {
        for length in [0, 1, 4, 8, 12, 16, 32, 40, 72, 256, 268, 4096] {
            let mut body = random.bytes(length);
            if random.below(2) == 0 {
                body.iter_mut().step_by(1 + random.below(4)).for_each(|byte| *byte = 0);
            }
            let flags = 1 | [0, 4, 8, 0xf0][random.below(4)];
            let mut bytes = if random.below(4) > 0 { negotiation.clone() } else { Vec::new() };
            bytes.extend(message(number, flags, &body));
            let cut = bytes.len().saturating_sub(random.below(3) * random.below(14));
            play_messages(&bytes[..cut]);
        }
    }
    for _ in 0..50 {
        let length = random.below(300);
        play_messages(&random.bytes(length));
    }
}
