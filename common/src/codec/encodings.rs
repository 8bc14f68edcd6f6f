//! Which encodings a side knows.

use super::Encoding;

/// A set of encodings, as the bits with the numbers of their codes: those that a peer knows and this
/// side does not are kept and never asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encodings(pub u64);

impl Encodings {
    /// All that this version knows.
    pub fn all() -> Encodings {
        Encodings(Encoding::ALL.iter().fold(0, |bits, encoding| bits | 1 << encoding.code()))
    }

    /// Whether an encoding is among them.
    pub fn contain(self, encoding: Encoding) -> bool {
        self.0 >> encoding.code() & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_its_encodings_and_no_others() {
        assert!(Encoding::ALL.into_iter().all(|encoding| Encodings::all().contain(encoding)));
        let set = Encodings(1 << 63 | 1 << Encoding::Int8.code());
        let found: Vec<_> = Encoding::ALL.into_iter().filter(|&e| set.contain(e)).collect();
        assert_eq!(found, [Encoding::Int8]);
    }
}
