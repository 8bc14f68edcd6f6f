//! [`PtxError`]: why a PTX text is refused.

use std::fmt;

/// Why a PTX text is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PtxError {
    /// The text does not have the form of PTX.
    Syntax {
        /// The line, from 1.
        line: u32,
        /// The text that was expected, and the text that was found.
        message: String,
    },
    /// The interpreter does not know an instruction or one of its forms.
    UnknownInstruction {
        /// The line, from 1.
        line: u32,
        /// The text of the instruction.
        text: String,
    },
    /// A name is used that is not declared.
    UnknownName {
        /// The line, from 1.
        line: u32,
        /// The name.
        name: String,
    },
    /// The version, target or address size is not supported.
    Target {
        /// The directive.
        directive: String,
    },
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PtxError::Syntax { line, message } => write!(f, "line {line}: {message}"),
            PtxError::UnknownInstruction { line, text } => {
                write!(f, "line {line}: unknown instruction: {text}")
            }
            PtxError::UnknownName { line, name } => write!(f, "line {line}: unknown name: {name}"),
            PtxError::Target { directive } => write!(f, "unsupported target: {directive}"),
        }
    }
}

impl std::error::Error for PtxError {}
