//! [`VariableCase`]: tables of variables and flags, for the tests of places and of clusters.

use std::collections::BTreeMap;

/// Variables and flags, and the expected text.
pub(crate) struct VariableCase<'a> {
    pub(crate) line: usize,
    pub(crate) variables: BTreeMap<&'a str, &'a str>,
    /// The flags without their hyphens, each with its value.
    pub(crate) flags: Vec<(&'a str, &'a str)>,
    pub(crate) expected: &'a str,
}

/// Reads the cases of a table: lines `NAME=value` and `--flag value`, then `-> text`.
pub(crate) fn cases(table: &str) -> Vec<VariableCase<'_>> {
    let mut cases = Vec::new();
    let mut variables = BTreeMap::new();
    let mut flags = Vec::new();
    for (line, text) in (1..).zip(table.lines()) {
        if let Some(expected) = text.strip_prefix("-> ") {
            let variables = std::mem::take(&mut variables);
            let flags = std::mem::take(&mut flags);
            cases.push(VariableCase { line, variables, flags, expected });
        } else if let Some(flag) = text.strip_prefix("--").and_then(|flag| flag.split_once(' ')) {
            flags.push(flag);
        } else if let Some((name, value)) = text.split_once('=').filter(|_| !text.starts_with('#'))
        {
            assert!(variables.insert(name, value).is_none(), "line {line} repeats {name}");
        } else {
            assert!(text.is_empty() || text.starts_with('#'), "line {line}: {text}");
        }
    }
    assert!(variables.is_empty() && flags.is_empty(), "the last case expects nothing");
    cases
}
