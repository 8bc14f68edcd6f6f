//! The text form of a codec: `f16`, `onebit`, `topk(0.01)`.

use std::fmt;
use std::str::FromStr;

use super::{Codec, CodecError, Encoding};

/// Writes the shortest text that parses to the same codec.
impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::TopK { fraction } => write!(f, "topk({fraction})"),
            Codec::Threshold { magnitude } => write!(f, "threshold({magnitude})"),
            codec => codec.encoding().fmt(f),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Encoding::F16 => "f16",
            Encoding::Bf16 => "bf16",
            Encoding::Int8 => "int8",
            Encoding::OneBit => "onebit",
            Encoding::Pairs => "pairs",
        })
    }
}

/// Parses a name, with its argument in parentheses if it has one, and validates it.
impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Codec, CodecError> {
        let unknown = || CodecError::Text { text: text.chars().take(80).collect() };
        let argument = |text: &str| text.trim().parse::<f64>().map_err(|_| unknown());
        let called = |name: &str| text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')');
        let codec = match text {
            "f16" => Codec::F16,
            "bf16" => Codec::Bf16,
            "int8" => Codec::Int8,
            "onebit" => Codec::OneBit,
            _ => match (called("topk"), called("threshold")) {
                (Some(fraction), _) => Codec::TopK { fraction: argument(fraction)? },
                (_, Some(magnitude)) => Codec::Threshold { magnitude: argument(magnitude)? },
                _ => return Err(unknown()),
            },
        };
        codec.validate().map(|()| codec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codec_texts_round_trip() {
        for text in ["f16", "bf16", "int8", "onebit", "topk(0.01)", "threshold(0.0001)"] {
            assert_eq!(text.parse::<Codec>().unwrap().to_string(), text);
        }
        for text in ["", "F16", "topk", "topk()", "topk(0.1", "pairs", "threshold(x)"] {
            assert!(matches!(text.parse::<Codec>(), Err(CodecError::Text { .. })), "{text}");
        }
    }

    #[test]
    fn parameters_are_checked() {
        for text in ["topk(0)", "topk(1.01)", "topk(NaN)", "threshold(0)", "threshold(inf)"] {
            assert!(matches!(text.parse::<Codec>(), Err(CodecError::Parameter { .. })), "{text}");
        }
        assert_eq!("topk(1)".parse(), Ok(Codec::TopK { fraction: 1.0 }));
    }
}
