//! [`ByteSize`]: a number of bytes in a unit that fits, for texts.

use std::fmt;

/// A number of bytes. Its text has the largest binary unit of which it is at least one, and one
/// decimal if it is no whole number of them: `512 bytes`, `1.5 KiB`, `16 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        // A size that is rounded up to a unit has that unit.
        let is_at_least = |&(_, bits): &(&str, u32)| {
            let tenths = (u128::from(bytes) * 10 + (1 << (bits - 1))) >> bits;
            tenths >= 10
        };
        match UNITS.iter().find(|unit| is_at_least(unit)) {
            None if bytes == 1 => f.pad("1 byte"),
            None => f.pad(&format!("{bytes} bytes")),
            Some(&(unit, bits)) if bytes.is_multiple_of(1 << bits) => {
                f.pad(&format!("{} {unit}", bytes >> bits))
            }
            Some(&(unit, bits)) => {
                f.pad(&format!("{:.1} {unit}", bytes as f64 / (1_u64 << bits) as f64))
            }
        }
    }
}

/// The units, largest first, with the power of two that each is.
const UNITS: [(&str, u32); 6] =
    [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_a_unit_that_fits() {
        for (bytes, expected) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (900, "900 bytes"),
            (972, "972 bytes"),
            (973, "1.0 KiB"),
            (1023, "1.0 KiB"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (1 << 20, "1 MiB"),
            (27 << 19, "13.5 MiB"),
            ((16 << 30) + 1, "16.0 GiB"),
            (16 << 30, "16 GiB"),
            (3 << 40, "3 TiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), expected);
        }
        assert_eq!(format!("{:<7}|", ByteSize(2048)), "2 KiB  |");
    }
}
