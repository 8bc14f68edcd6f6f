//! The text form of an initializer: `zeros`, `constant(0.1)`, `normal(0.0,0.05)`.

use std::fmt;
use std::str::FromStr;

use super::{Initializer, InitializerError};

/// Writes the shortest text that parses to the same initializer.
impl fmt::Display for Initializer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Initializer::Zeros => f.write_str("zeros"),
            Initializer::Ones => f.write_str("ones"),
            Initializer::Constant(value) => write!(f, "constant({value:?})"),
            Initializer::Uniform { low, high } => write!(f, "uniform({low:?},{high:?})"),
            Initializer::Normal { mean, stddev } => write!(f, "normal({mean:?},{stddev:?})"),
            Initializer::TruncatedNormal { mean, stddev } => {
                write!(f, "truncated_normal({mean:?},{stddev:?})")
            }
            Initializer::GlorotUniform => f.write_str("glorot_uniform"),
            Initializer::GlorotNormal => f.write_str("glorot_normal"),
            Initializer::HeUniform => f.write_str("he_uniform"),
            Initializer::HeNormal => f.write_str("he_normal"),
        }
    }
}

/// Parses a name, with arguments in parentheses if it has any, and validates them.
impl FromStr for Initializer {
    type Err = InitializerError;

    fn from_str(text: &str) -> Result<Initializer, InitializerError> {
        let unknown = || InitializerError::Text { text: text.chars().take(80).collect() };
        let (name, arguments) = match text.split_once('(') {
            None => (text, Vec::new()),
            Some((name, rest)) => {
                let inside = rest.strip_suffix(')').ok_or_else(unknown)?;
                let numbers = inside.split(',').map(|word| word.trim().parse::<f64>());
                (name, numbers.collect::<Result<_, _>>().map_err(|_| unknown())?)
            }
        };
        let initializer = match (name, &arguments[..]) {
            ("zeros", []) => Initializer::Zeros,
            ("ones", []) => Initializer::Ones,
            ("constant", &[value]) => Initializer::Constant(value),
            ("uniform", &[low, high]) => Initializer::Uniform { low, high },
            ("normal", &[mean, stddev]) => Initializer::Normal { mean, stddev },
            ("truncated_normal", &[mean, stddev]) => Initializer::TruncatedNormal { mean, stddev },
            ("glorot_uniform", []) => Initializer::GlorotUniform,
            ("glorot_normal", []) => Initializer::GlorotNormal,
            ("he_uniform", []) => Initializer::HeUniform,
            ("he_normal", []) => Initializer::HeNormal,
            _ => return Err(unknown()),
        };
        initializer.validate().map(|()| initializer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_are_parsed_and_validated() {
        let table = [
            ("zeros", "zeros"),
            ("constant( 1 )", "constant(1.0)"),
            ("uniform(-0.05, 0.05)", "uniform(-0.05,0.05)"),
            ("normal(0,1e300)", "normal(0.0,1e300)"),
            ("truncated_normal(0,0.1)", "truncated_normal(0.0,0.1)"),
            ("he_normal", "he_normal"),
        ];
        for (text, expected) in table {
            assert_eq!(text.parse::<Initializer>().unwrap().to_string(), expected);
        }
        for name in ["ones", "glorot_uniform", "glorot_normal", "he_uniform"] {
            assert_eq!(name.parse::<Initializer>().unwrap().to_string(), name);
        }
        for text in ["", "Zeros", "zeros()", "normal(1)", "normal(1,2", "constant(x)", "ones(1)"] {
            let error = text.parse::<Initializer>().unwrap_err();
            assert_eq!(error, InitializerError::Text { text: text.into() });
        }
        for text in ["constant(nan)", "constant(inf)", "uniform(1,0)", "normal(0,-1)"] {
            let error = text.parse::<Initializer>().unwrap_err();
            assert!(!matches!(error, InitializerError::Text { .. }), "{text}");
        }
    }

    proptest! {
        #[test]
        fn text_round_trips(a in -1e100..1e100f64, b in 0.0..1e100f64) {
            for initializer in [
                Initializer::Constant(a),
                Initializer::Uniform { low: a, high: a + b },
                Initializer::Normal { mean: a, stddev: b },
                Initializer::TruncatedNormal { mean: a, stddev: b },
            ] {
                prop_assert_eq!(initializer.to_string().parse(), Ok(initializer));
            }
        }
    }
}
