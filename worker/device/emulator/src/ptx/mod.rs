//! PTX: from text to instructions whose registers are numbers. Pure.
//!
//! [`parse`] checks the syntax and keeps names. [`link`] gives every name its place, and refuses an
//! instruction that the interpreter does not know.

mod body;
mod decode;
mod error;
mod instruction;
mod layout;
mod lexer;
mod parser;
mod program;
mod syntax;

pub(crate) use decode::{LOCAL_WINDOW, SHARED_WINDOW};
pub use error::PtxError;
pub use instruction::Space;
pub(crate) use instruction::{
    Address, AtomicOperation, BarrierKind, Call, FRAME, Load, Operation, Register, Shuffle,
    ShuffleMode, Special, Store, VoteKind,
};
pub use parser::parse;
pub(crate) use program::Code;
pub use program::{Kernel, Parameter, Program, link};
pub use syntax::{Initializer, Module, Variable, VariableSpace};
