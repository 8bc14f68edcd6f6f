//! [`Chain`]: the text of an error with its causes.

use std::error::Error;
use std::fmt;

/// Displays an error and its causes, from the outermost to the innermost, with `: ` between them.
///
/// An error of this workspace does not display its [`source`](Error::source), so a program that
/// shows errors to a person prints their chain. A cause is left out if the text before has it between
/// colons or at its end: errors of other crates may display their source.
///
/// ```
/// use pushpull_common::error::Chain;
/// use pushpull_common::variable::VariableSpec;
///
/// let error = VariableSpec::f32("w", [0; 40]).unwrap_err();
/// assert!(Chain(&error).to_string().starts_with("cannot declare the variable \"w\": "));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut source = self.0.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !has_cause(&text, &cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        f.write_str(&text)
    }
}

/// Returns whether a text has this cause as one of its parts between colons.
fn has_cause(text: &str, cause: &str) -> bool {
    cause.is_empty() || format!(": {text}: ").contains(&format!(": {cause}: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nested(&'static str, Option<Box<Nested>>);

    impl fmt::Display for Nested {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Nested {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_ref().map(|inner| &**inner as _)
        }
    }

    #[test]
    fn every_cause_is_displayed_once() {
        let inner = Nested("the disk is full", None);
        assert_eq!(Chain(&inner).to_string(), "the disk is full");
        let middle = Nested("cannot write a: the disk is full", Some(Box::new(inner)));
        let outer = Nested("cannot save", Some(Box::new(middle)));
        assert_eq!(Chain(&outer).to_string(), "cannot save: cannot write a: the disk is full");
        for (text, cause, expected) in [
            ("the hook Log failed in end", "failed", "the hook Log failed in end: failed"),
            ("cannot read a", "no", "cannot read a: no"),
            ("cannot read a: no file", "no", "cannot read a: no file: no"),
            ("cannot read a: no: stopped", "no", "cannot read a: no: stopped"),
            ("cannot read a", "", "cannot read a"),
            ("no", "no", "no"),
        ] {
            let error = Nested(text, Some(Box::new(Nested(cause, None))));
            assert_eq!(Chain(&error).to_string(), expected);
        }
    }
}
