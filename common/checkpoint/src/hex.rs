//! Lower-case hexadecimal digits of bytes, as text and in JSON.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// Returns the digits of `bytes`.
pub(crate) fn encode(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Serializes bytes, for `#[serde(with = "hex")]`.
pub(crate) fn serialize<T: AsRef<[u8]>, S: Serializer>(
    bytes: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&encode(bytes.as_ref()))
}

/// Deserializes bytes, for `#[serde(with = "hex")]`. Accepts only the output of [`serialize`].
pub(crate) fn deserialize<'de, T: TryFrom<Vec<u8>>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    let value = |digit: u8| DIGITS.iter().position(|&d| d == digit).map(|value| value as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> =
        pairs.iter().map(|&[high, low]| Some(value(high)? << 4 | value(low)?)).collect();
    let bytes = bytes.filter(|_| rest.is_empty());
    let bytes = bytes.ok_or_else(|| D::Error::custom("a text that is not hexadecimal"))?;
    T::try_from(bytes).map_err(|_| D::Error::custom("a hexadecimal text of the wrong length"))
}

const DIGITS: &[u8; 16] = b"0123456789abcdef";
