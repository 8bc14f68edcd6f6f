//! Fuzzes a function server with clients that send valid messages with arbitrary numbers in
//! every field. See `pushpull_services::adversary`.

#![no_main]

use std::time::Instant;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    pushpull_services::adversary::play_service(Instant::now(), input);
});
