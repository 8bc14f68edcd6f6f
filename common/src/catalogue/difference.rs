//! Describes how two declarations of a variable differ.

use crate::table::TableSpec;
use crate::variable::VariableSpec;

/// Describes the first difference in words, `ours` first; `None` if the declarations are equal.
pub(super) fn of_variables(ours: &VariableSpec, theirs: &VariableSpec) -> Option<String> {
    let (name, other) = (ours.name(), theirs.name());
    if name != other {
        return Some(format!("a variable is named {name:?}, not {other:?}"));
    }
    if ours.dtype() != theirs.dtype() {
        return Some(format!("{name:?} is of {}, not {}", ours.dtype(), theirs.dtype()));
    }
    if ours.shape() != theirs.shape() {
        return Some(format!("{name:?} has the shape {}, not {}", ours.shape(), theirs.shape()));
    }
    if ours.is_trainable() != theirs.is_trainable() {
        let word = |trainable| if trainable { "trainable" } else { "plain" };
        let a = word(ours.is_trainable());
        let b = word(theirs.is_trainable());
        return Some(format!("{name:?} is {a}, not {b}"));
    }
    if ours.replication() != theirs.replication() {
        let a = ours.replication();
        let b = theirs.replication();
        return Some(format!("{name:?} is {a}, not {b}"));
    }
    if ours.is_sparse() != theirs.is_sparse() {
        let word = |sparse| if sparse { "sparse" } else { "dense" };
        let a = word(ours.is_sparse());
        let b = word(theirs.is_sparse());
        return Some(format!("{name:?} is {a}, not {b}"));
    }
    if ours.as_table() != theirs.as_table() {
        let word =
            |table: Option<&TableSpec>| table.map_or("no table".to_owned(), |t| format!("{t:?}"));
        let a = word(ours.as_table());
        let b = word(theirs.as_table());
        return Some(format!("{name:?} is {a}, not {b}"));
    }
    if (ours.initializer, ours.seed) != (theirs.initializer, theirs.seed) {
        return Some(format!(
            "{name:?} starts as {} with seed {}, not {} with seed {}",
            ours.initializer, ours.seed, theirs.initializer, theirs.seed
        ));
    }
    None
}
