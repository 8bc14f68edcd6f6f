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
    AtomicOperation, BarrierKind, CallInstruction, FRAME, LoadInstruction, MemoryOperand,
    PtxOperation, Register, Shuffle, ShuffleMode, Special, StoreInstruction, VoteKind,
};
pub use parser::parse;
pub(crate) use program::LinkedFunction;
pub use program::{Kernel, KernelParameter, Program, link};
pub use syntax::{Module, PtxInitializer, Variable, VariableSpace};
