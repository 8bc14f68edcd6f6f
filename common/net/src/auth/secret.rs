//! Secrets of access tokens, in memory that no core dump has.

use std::fmt;
use std::io;

use hmac::{Hmac, Mac};
use memmap2::MmapMut;
use sha2::Sha256;
use zeroize::Zeroize;

/// The bytes of a proof.
pub(crate) type Proof = [u8; 32];

/// The secret of an access token: 16 to 64 bytes.
///
/// Its memory is no part of a core dump, and is overwritten when the secret is dropped. `Debug`
/// displays nothing of it.
pub struct Secret {
    bytes: SecretMemory,
}

impl Secret {
    /// The least bytes of a secret: 128 bits.
    pub const BYTES_MIN: usize = 16;
    /// The most bytes of a secret: more than a block of SHA-256 adds nothing.
    pub const BYTES_MAX: usize = 64;

    /// Reads a secret from its hexadecimal digits.
    ///
    /// # Errors
    /// [`SecretError`], which displays nothing of the digits.
    pub fn from_hex(digits: &str) -> Result<Secret, SecretError> {
        let digits = digits.as_bytes();
        let bytes = digits.len() / 2;
        if !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(SecretError::Digits);
        }
        if !(Secret::BYTES_MIN..=Secret::BYTES_MAX).contains(&bytes) {
            return Err(SecretError::Length { bits: 8 * bytes });
        }
        let mut memory = SecretMemory::new(bytes)?;
        for (byte, pair) in memory.bytes_mut().iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0]) << 4 | value(pair[1]);
        }
        Ok(Secret { bytes: memory })
    }

    /// Takes random bytes as a secret.
    ///
    /// # Errors
    /// [`SecretError::Memory`] if the system grants no memory.
    pub fn from_random(bytes: &[u8; 32]) -> Result<Secret, SecretError> {
        let mut memory = SecretMemory::new(bytes.len())?;
        memory.bytes_mut().copy_from_slice(bytes);
        Ok(Secret { bytes: memory })
    }

    /// Returns the HMAC-SHA-256 of parts under this secret.
    pub(super) fn authenticate(&self, parts: &[&[u8]]) -> Proof {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Returns whether a proof is the HMAC-SHA-256 of parts, in a time that does not depend on it.
    pub(super) fn verify(&self, parts: &[&[u8]], proof: &Proof) -> bool {
        self.mac(parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.bytes.bytes())
            .expect("HMAC takes a key of any length");
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        // Of their proofs, so that the time tells nothing of where they differ.
        self.verify(&[], &other.authenticate(&[]))
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Returns the value of a hexadecimal digit.
fn value(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

/// Returns the hexadecimal digits of a new secret of 256 bits.
///
/// # Errors
/// If the system has no random bytes.
pub fn new_secret() -> io::Result<String> {
    Ok(super::random()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The reason why a text is no secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// It has something else than pairs of hexadecimal digits.
    #[error("the secret must be pairs of hexadecimal digits")]
    Digits,
    /// It is too short or too long.
    #[error("the secret has {bits} bits, not 128 to 512")]
    Length {
        /// Its length in bits.
        bits: usize,
    },
    /// The system grants no memory for it.
    #[error("cannot get memory for a secret")]
    Memory(#[from] io::Error),
}

/// Memory that is no part of a core dump, and is overwritten when it is dropped.
pub(super) struct SecretMemory {
    map: MmapMut,
    len: usize,
}

impl SecretMemory {
    /// Returns memory of zeros.
    pub(super) fn new(len: usize) -> io::Result<SecretMemory> {
        let map = MmapMut::map_anon(len.max(1))?;
        #[cfg(target_os = "linux")]
        map.advise(memmap2::Advice::DontDump)?;
        Ok(SecretMemory { map, len })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map[..self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.len]
    }
}

impl Drop for SecretMemory {
    fn drop(&mut self) {
        self.map.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_pairs_of_hexadecimal_digits() {
        let secret = Secret::from_hex("00ff10aBCdef0123456789abcdef0123").unwrap();
        let bytes = [0, 255, 16, 0xab, 0xcd, 0xef, 1, 0x23, 0x45, 0x67, 0x89];
        assert_eq!(secret.bytes.bytes()[..11], bytes);
        let refused = |text: &str| Secret::from_hex(text).unwrap_err().to_string();
        assert_eq!(refused("00ff1"), "the secret must be pairs of hexadecimal digits");
        assert_eq!(refused(&"0g".repeat(16)), "the secret must be pairs of hexadecimal digits");
        assert_eq!(refused(&"é".repeat(16)), "the secret must be pairs of hexadecimal digits");
        assert_eq!(refused(&"00".repeat(15)), "the secret has 120 bits, not 128 to 512");
        assert_eq!(refused(&"00".repeat(65)), "the secret has 520 bits, not 128 to 512");
        assert_eq!(refused(""), "the secret has 0 bits, not 128 to 512");
    }

    #[test]
    fn a_proof_is_that_of_rfc_4231() {
        // Test case 3: a key of 20 bytes, and 50 bytes of data.
        let secret = Secret::from_hex(&"aa".repeat(20)).unwrap();
        let proof = secret.authenticate(&[&[0xdd; 20], &[0xdd; 30]]);
        let expected = "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe";
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
        assert!(secret.verify(&[&[0xdd; 50]], &proof));
        assert!(!secret.verify(&[&[0xdd; 49]], &proof));
    }

    #[test]
    fn secrets_are_equal_by_their_bytes_and_display_nothing() {
        let of = |digits: &str| Secret::from_hex(&digits.repeat(16)).unwrap();
        assert_eq!(of("ab"), of("AB"));
        assert_ne!(of("ab"), of("ac"));
        assert_eq!(format!("{:?}", of("ab")), "Secret");
    }
}
