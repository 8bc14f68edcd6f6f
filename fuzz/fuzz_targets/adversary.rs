//! A shard whose peers say anything that can be said, with any number in every field; killed and opened
//! again now and then. See `pushpull_ps::adversary`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    pushpull_ps::adversary::play(input);
});
