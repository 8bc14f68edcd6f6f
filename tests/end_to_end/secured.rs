//! The run of these tests over TLS and with tokens: `PUSHPULL_TEST_CREDENTIALS` names the folder of the
//! files (`CONTRIBUTING.md`).

/// The bytes of a handshake of TLS and of tokens, with room to spare.
const HANDSHAKE_BYTES: u64 = 6 << 10;

/// Returns whether all connections of this process have credentials. No release build reads the
/// variable.
pub(crate) fn is_secured() -> bool {
    cfg!(debug_assertions) && std::env::var_os("PUSHPULL_TEST_CREDENTIALS").is_some()
}

/// Returns whether a test that speaks frames by itself is left out: TLS carries none of them.
pub(crate) fn leaves_out_plain_frames() -> bool {
    if is_secured() {
        println!("SKIPPED: a peer that speaks plain frames meets TLS");
    }
    is_secured()
}

/// Returns the bytes that a connection needs before its first frame after the hello.
pub(crate) fn handshake_bytes() -> u64 {
    if is_secured() { HANDSHAKE_BYTES } else { 0 }
}
