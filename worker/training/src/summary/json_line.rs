//! JSON objects in one line each, for logs.

use std::fmt::Write;

/// Builds a JSON object, in the order of the calls.
///
/// Numbers that JSON lacks are strings: `"NaN"`, `"Infinity"` and `"-Infinity"`.
#[derive(Debug)]
pub(crate) struct JsonLine {
    text: String,
}

impl JsonLine {
    pub(crate) fn new() -> JsonLine {
        JsonLine { text: "{".to_owned() }
    }

    /// Ends the object and the line.
    pub(crate) fn finish(mut self) -> String {
        self.text.push_str("}\n");
        self.text
    }

    pub(crate) fn string(&mut self, name: &str, value: &str) {
        self.name(name);
        self.quote(value);
    }

    pub(crate) fn boolean(&mut self, name: &str, value: bool) {
        self.name(name);
        self.text.push_str(if value { "true" } else { "false" });
    }

    pub(crate) fn integer(&mut self, name: &str, value: u64) {
        self.name(name);
        self.display(value);
    }

    pub(crate) fn number(&mut self, name: &str, value: f64) {
        self.name(name);
        self.value(value);
    }

    pub(crate) fn numbers(&mut self, name: &str, values: &[f64]) {
        self.name(name);
        self.text.push('[');
        for (index, &value) in values.iter().enumerate() {
            if index > 0 {
                self.text.push(',');
            }
            self.value(value);
        }
        self.text.push(']');
    }

    /// Adds an object, whose fields `body` adds.
    pub(crate) fn object(&mut self, name: &str, body: impl FnOnce(&mut JsonLine)) {
        self.name(name);
        self.text.push('{');
        body(self);
        self.text.push('}');
    }

    fn name(&mut self, name: &str) {
        if !self.text.ends_with('{') {
            self.text.push(',');
        }
        self.quote(name);
        self.text.push(':');
    }

    /// Writes the shortest digits that give the same number. Very large and very small numbers have
    /// an exponent.
    fn value(&mut self, value: f64) {
        let size = value.abs();
        match value {
            _ if value.is_nan() => self.quote("NaN"),
            f64::INFINITY => self.quote("Infinity"),
            f64::NEG_INFINITY => self.quote("-Infinity"),
            _ if size != 0.0 && !(1e-5..1e16).contains(&size) => {
                self.display(format_args!("{value:e}"));
            }
            _ => self.display(value),
        }
    }

    fn quote(&mut self, text: &str) {
        self.text.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\t' => self.text.push_str("\\t"),
                '\r' => self.text.push_str("\\r"),
                _ if letter < ' ' => self.display(format_args!("\\u{:04x}", u32::from(letter))),
                _ => self.text.push(letter),
            }
        }
        self.text.push('"');
    }

    fn display(&mut self, value: impl std::fmt::Display) {
        // Formatting into a string cannot fail.
        let _ = write!(self.text, "{value}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn an_object_is_one_line() {
        let mut line = JsonLine::new();
        line.number("wall_time", 1_795_000_000.25);
        line.integer("step", u64::MAX);
        line.string("tag", "a \"b\" \\ \n\u{1}");
        line.numbers("values", &[1.0, -0.5, 1e300, f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
        line.numbers("none", &[]);
        line.object("empty", |_| ());
        line.object("nested", |line| {
            line.boolean("yes", true);
            line.boolean("no", false);
        });
        assert_eq!(
            line.finish(),
            concat!(
                r#"{"wall_time":1795000000.25,"step":18446744073709551615,"#,
                r#""tag":"a \"b\" \\ \n\u0001","#,
                r#""values":[1,-0.5,1e300,"NaN","Infinity","-Infinity"],"none":[],"empty":{},"#,
                r#""nested":{"yes":true,"no":false}}"#,
                "\n"
            )
        );
    }

    proptest! {
        #[test]
        fn another_parser_reads_the_same(
            name in ".*",
            text in ".*",
            number in any::<f64>(),
            bits in any::<u64>(),
        ) {
            let mut line = JsonLine::new();
            line.object("o", |line| line.string(&name, &text));
            line.numbers("n", &[number, f64::from_bits(bits)]);
            let line = line.finish();
            prop_assert_eq!(line.matches('\n').count(), 1);
            let read: Value = serde_json::from_str(&line).unwrap();
            prop_assert_eq!(read["o"][&name].as_str(), Some(&text[..]));
            for (index, number) in [number, f64::from_bits(bits)].into_iter().enumerate() {
                // That parser rounds the last digit wrongly: of a subnormal number the last bit.
                let rounding = (number.abs() * 1e-15).max(f64::from_bits(1));
                match read["n"][index].as_f64() {
                    Some(read) => prop_assert!((read - number).abs() <= rounding),
                    None => prop_assert!(!number.is_finite()),
                }
            }
        }

        #[test]
        fn a_number_survives_exactly(bits in any::<u64>()) {
            let number = f64::from_bits(bits);
            let mut line = JsonLine::new();
            line.number("n", number);
            let line = line.finish();
            let text = line.strip_prefix("{\"n\":").and_then(|rest| rest.strip_suffix("}\n"));
            let text = text.unwrap().trim_matches('"');
            let read: f64 = text.replace("Infinity", "inf").parse().unwrap();
            prop_assert!(read.to_bits() == bits || number.is_nan() && read.is_nan());
        }
    }
}
