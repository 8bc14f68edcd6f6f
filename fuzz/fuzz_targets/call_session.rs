//! Fuzzes a client of functions with hostile servers. See `pushpull_services::adversary`.

#![no_main]

use std::time::Instant;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    pushpull_services::adversary::play_call_session(Instant::now(), input);
});
