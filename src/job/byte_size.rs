//! [`parse_byte_size`]: sizes of memory as people write them, such as `16G` or `512MiB`.

use std::fmt;

/// The reason why a text is no size of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ByteSizeError {
    /// There is no whole number in front of the unit.
    Number,
    /// The unit is none of those that are known.
    Unit(String),
    /// The size is 2^64 bytes or more.
    TooLarge,
}

impl std::error::Error for ByteSizeError {}

impl fmt::Display for ByteSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ByteSizeError::Number => f.write_str(
                "a size is a whole number of bytes, or one with a unit such as 512M or 16G",
            ),
            ByteSizeError::Unit(unit) => write!(
                f,
                "{unit:?} is no unit of bytes; K, M, G and T are powers of 1024, as are KiB to TiB, and \
                 KB, MB, GB and TB are powers of 1000"
            ),
            ByteSizeError::TooLarge => f.write_str("a size is below 2^64 bytes"),
        }
    }
}

/// Parses a number of bytes, with or without a unit. Units may have any case; as in GNU tools, `K`
/// and `KiB` are 1024 bytes and `KB` is 1000.
pub fn parse_byte_size(text: &str) -> Result<u64, ByteSizeError> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(ByteSizeError::Number);
    }
    let number: u64 = number.parse().map_err(|_| ByteSizeError::TooLarge)?;
    let unit = unit.trim();
    let factor = factor_of(&unit.to_ascii_lowercase());
    let factor = factor.ok_or_else(|| match unit.starts_with(['.', ',']) {
        true => ByteSizeError::Number,
        false => ByteSizeError::Unit(unit.to_owned()),
    })?;
    number.checked_mul(factor).ok_or(ByteSizeError::TooLarge)
}

/// Returns the bytes of a unit in lower case.
fn factor_of(unit: &str) -> Option<u64> {
    if matches!(unit, "" | "b") {
        return Some(1);
    }
    let mut letters = unit.chars();
    let power = 1 + "kmgt".find(letters.next()?)? as u32;
    match letters.as_str() {
        "" | "i" | "ib" => 1024_u64.checked_pow(power),
        "b" => 1000_u64.checked_pow(power),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_with_units_of_gnu() {
        let table = [
            ("0", 0),
            ("67108864", 64 << 20),
            ("1b", 1),
            ("2k", 2048),
            ("512M", 512 << 20),
            ("16G", 16 << 30),
            ("16Gi", 16 << 30),
            ("16 GiB", 16 << 30),
            ("1tib", 1 << 40),
            ("3MB", 3_000_000),
            ("2gb", 2_000_000_000),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, expected) in table {
            assert_eq!(parse_byte_size(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_by_what_is_wrong() {
        let unit = |unit: &str| ByteSizeError::Unit(unit.to_owned());
        let table = [
            ("", ByteSizeError::Number),
            ("G", ByteSizeError::Number),
            ("-1", ByteSizeError::Number),
            ("1.5G", ByteSizeError::Number),
            ("1,5G", ByteSizeError::Number),
            ("16X", unit("X")),
            ("16Gb/s", unit("Gb/s")),
            ("16 giga", unit("giga")),
            ("0x10", unit("x10")),
            ("1e9", unit("e9")),
            ("18446744073709551616", ByteSizeError::TooLarge),
            ("16777216T", ByteSizeError::TooLarge),
        ];
        for (text, expected) in table {
            assert_eq!(parse_byte_size(text), Err(expected), "{text}");
        }
    }
}
