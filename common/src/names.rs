//! Which variables a setting is for.

use std::fmt;

/// The variable of a name, or if a `*` stands at the end, all whose names begin so; `*` alone is all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(String);

impl Names {
    /// Whether a variable of this name is one of them.
    pub fn contain(&self, name: &str) -> bool {
        match self.0.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == self.0,
        }
    }

    /// Whether all variables are, by whatever name.
    pub fn are_all(&self) -> bool {
        self.0 == "*"
    }

    /// As they were given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for Names {
    fn from(names: T) -> Self {
        Names(names.into())
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_at_the_end_stands_for_any_rest() {
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
            // Elsewhere it is a character like others.
            ("*/w", "layer/w", false),
            ("*/w", "*/w", true),
        ];
        for (names, name, expected) in table {
            assert_eq!(Names::from(names).contain(name), expected, "{names} and {name}");
        }
        assert!(Names::from("*").are_all() && !Names::from("w*").are_all());
    }
}
