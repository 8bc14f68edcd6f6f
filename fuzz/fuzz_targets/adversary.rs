//! Fuzzes a shard with valid messages that carry arbitrary numbers in every field. The shard is
//! killed and opened again now and then. See `pushpull_ps::testing::adversary`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    pushpull_ps::testing::adversary::play(input);
});
