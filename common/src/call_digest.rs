//! The running digest of the calls of a coordinator.

use sha2::{Digest, Sha256};

/// Digests a call behind all calls before it.
///
/// Two programs whose digests of a call are equal have scheduled the same calls up to it: the
/// chance that others agree is 2^-64. Nobody is kept from seeking such calls.
#[derive(Clone, Debug)]
pub struct CallDigest {
    hash: Sha256,
}

impl CallDigest {
    /// Begins the digest of a call. `before` is that of the call before it, and 0 for the first.
    pub fn after(before: u64) -> CallDigest {
        CallDigest { hash: Sha256::new().chain_update(before.to_le_bytes()) }
    }

    /// Adds bytes. Their number is part of the digest, so no two lists of them are confused.
    pub fn add(&mut self, bytes: &[u8]) {
        self.hash.update((bytes.len() as u64).to_le_bytes());
        self.hash.update(bytes);
    }

    /// Returns the digest: the first 8 bytes of the SHA-256, little-endian, and never 0.
    pub fn finish(self) -> u64 {
        let hash = self.hash.finalize();
        let first = hash.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        first.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(before: u64, parts: &[&[u8]]) -> u64 {
        let mut digest = CallDigest::after(before);
        parts.iter().for_each(|part| digest.add(part));
        digest.finish()
    }

    #[test]
    fn a_digest_covers_order_bounds_and_what_was_before() {
        let one = digest(0, &[b"ab", b"c"]);
        assert_eq!(one, digest(0, &[b"ab", b"c"]));
        for other in
            [digest(0, &[b"a", b"bc"]), digest(0, &[b"c", b"ab"]), digest(1, &[b"ab", b"c"])]
        {
            assert_ne!(one, other);
        }
        // SHA-256 of eight zero bytes.
        assert_eq!(digest(0, &[]), 0x7a0b_81a1_f570_55af);
    }
}
