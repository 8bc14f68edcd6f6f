//! Fuzzes a rendezvous with any peers, a member with any rendezvous, and an operation with any
//! predecessor. See `pushpull_collective::adversary`.

#![no_main]

use std::time::Instant;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    pushpull_collective::adversary::play(Instant::now(), input);
});
