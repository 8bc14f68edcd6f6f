//! Name patterns: the variables that a setting applies to.

use std::fmt;

/// A pattern of variable names: an exact name, or a name with one `*` for any text, such as
/// `encoder/*` or `*/bias`. Further stars are ordinary characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern(String);

impl NamePattern {
    /// Returns whether the pattern matches a name.
    pub fn matches(&self, name: &str) -> bool {
        match self.0.split_once('*') {
            Some((start, end)) => name.strip_prefix(start).is_some_and(|rest| rest.ends_with(end)),
            None => name == self.0,
        }
    }

    /// Returns whether the pattern matches every name.
    pub fn matches_all(&self) -> bool {
        self.0 == "*"
    }

    /// Returns the pattern as given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for NamePattern {
    fn from(names: T) -> Self {
        NamePattern(names.into())
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_text() {
        let table = [
            ("w", "w", true),
            ("w", "w2", false),
            ("w", "layer/w", false),
            ("layer/*", "layer/w", true),
            ("layer/*", "layer/", true),
            ("layer/*", "layers", false),
            ("*", "", true),
            ("*", "w", true),
            ("", "w", false),
            ("*/w", "layer/w", true),
            ("*/w", "w", false),
            ("layer/*/w", "layer/1/w", true),
            ("layer/*/w", "layer/w", false),
            ("ab*ba", "aba", false),
            // A second star is an ordinary character.
            ("*/*", "layer/*", true),
            ("*/*", "layer/w", false),
        ];
        for (names, name, expected) in table {
            assert_eq!(NamePattern::from(names).matches(name), expected, "{names} and {name}");
        }
        assert!(NamePattern::from("*").matches_all() && !NamePattern::from("w*").matches_all());
    }
}
