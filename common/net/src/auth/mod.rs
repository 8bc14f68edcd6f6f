//! Who is at the other end: access tokens, the proofs that a side knows the secret of one, and the
//! files that have them.

pub(crate) mod access_report;
pub(crate) mod client;
pub(crate) mod credentials;
pub(crate) mod everywhere;
pub(crate) mod failures;
pub(crate) mod gate;
pub(crate) mod handshake;
pub(crate) mod places;
pub(crate) mod secret;
#[cfg(feature = "simulation")]
pub mod simulated_tokens;
pub(crate) mod token_file;

use std::io;

pub use access_report::AccessReport;
pub use client::{ClientProof, ProofError, ProofStep, QueuedProof, say_hello};
pub use credentials::{CredentialFiles, Credentials, CredentialsError};
pub use gate::ProvenPeer;
pub use handshake::{ChannelBinding, ClientHandshake, Nonce, ServerHandshake, UnprovenServer};
pub use secret::{Secret, SecretError, new_secret};
pub use token_file::{AccessList, AccessListError, AccessToken, EntryFault, check_tokens};

/// Returns bytes that nobody can foresee.
///
/// # Errors
/// If the system has none.
pub(crate) fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut rest = &mut bytes[..];
    while !rest.is_empty() {
        let count = rustix::rand::getrandom(&mut *rest, rustix::rand::GetRandomFlags::empty())?;
        rest = &mut rest[count..];
    }
    Ok(bytes)
}
