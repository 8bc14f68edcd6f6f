//! Name patterns: the variables that a setting applies to.

use std::fmt;

/// A pattern of variable names: an exact name, or a prefix followed by `*`; `*` alone matches all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern(String);

impl NamePattern {
    /// Returns whether the pattern matches a name.
    pub fn matches(&self, name: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
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
    fn a_trailing_star_matches_any_suffix() {
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
            // Anywhere else, a star is an ordinary character.
            ("*/w", "layer/w", false),
            ("*/w", "*/w", true),
        ];
        for (names, name, expected) in table {
            assert_eq!(NamePattern::from(names).matches(name), expected, "{names} and {name}");
        }
        assert!(NamePattern::from("*").matches_all() && !NamePattern::from("w*").matches_all());
    }
}
