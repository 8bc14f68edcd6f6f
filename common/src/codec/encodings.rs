//! The set of encodings that one side knows.

use super::Encoding;

/// A set of encodings: bit N stands for the encoding with code N.
///
/// Bits that this version does not know are kept and never requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encodings(pub u64);

impl Encodings {
    /// Returns all encodings that this version knows.
    pub fn all() -> Encodings {
        Encodings(Encoding::ALL.iter().fold(0, |bits, encoding| bits | 1 << encoding.code()))
    }

    /// Returns whether an encoding is in the set.
    pub fn contains(self, encoding: Encoding) -> bool {
        self.0 >> encoding.code() & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_contains_exactly_its_encodings() {
        assert!(Encoding::ALL.into_iter().all(|encoding| Encodings::all().contains(encoding)));
        let set = Encodings(1 << 63 | 1 << Encoding::Int8.code());
        let found: Vec<_> = Encoding::ALL.into_iter().filter(|&e| set.contains(e)).collect();
        assert_eq!(found, [Encoding::Int8]);
    }
}
