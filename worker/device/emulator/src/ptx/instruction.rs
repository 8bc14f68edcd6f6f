//! [`Instruction`]: what the interpreter executes.

use crate::scalar::{Binary, Carry, Comparison, Conversion, Ternary, Type, Unary};

/// A place in the registers of a function.
///
/// Constants and special registers have places, too, so every operand is one. The first two places
/// have a fixed meaning: [`FRAME`] and [`ZERO`].
pub(crate) type Register = u32;

/// The register with the local address of the function's variables.
pub(crate) const FRAME: Register = 0;
/// The register that is zero.
pub(crate) const ZERO: Register = 1;

/// A decoded instruction.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    /// The line of the text, from 1.
    pub(crate) line: u32,
    /// The condition under which it is executed.
    pub(crate) guard: Option<Guard>,
    /// The operation.
    pub(crate) operation: PtxOperation,
}

/// The predicate of an instruction.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields say it")]
pub(crate) struct Guard {
    pub(crate) register: Register,
    pub(crate) negated: bool,
}

/// A state space of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub enum Space {
    Generic,
    Global,
    Constant,
    Shared,
    Local,
    Parameter,
}

/// A memory operand.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields say it")]
pub(crate) struct MemoryOperand {
    pub(crate) space: Space,
    pub(crate) base: Register,
    pub(crate) offset: i64,
}

/// The operation of an instruction. `d` is the destination.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub(crate) enum PtxOperation {
    Move {
        d: Register,
        a: Register,
    },
    Unary {
        f: Unary,
        d: Register,
        a: Register,
    },
    Binary {
        f: Binary,
        d: Register,
        a: Register,
        b: Register,
    },
    Ternary {
        f: Ternary,
        d: Register,
        a: Register,
        b: Register,
        c: Register,
    },
    /// A division or remainder of integers, which faults if `b` is zero.
    Divide {
        f: Binary,
        of: Type,
        d: Register,
        a: Register,
        b: Register,
    },
    Convert {
        how: Conversion,
        d: Register,
        a: Register,
    },
    /// Compares, and combines the outcome with a predicate: `d` has it, `q` its opposite.
    Compare {
        f: Comparison,
        combine: Option<(Binary, Register)>,
        d: Register,
        q: Register,
        a: Register,
        b: Register,
    },
    Carry {
        how: Carry,
        d: Register,
        a: Register,
        b: Register,
        c: Register,
    },
    Load(LoadInstruction),
    Store(StoreInstruction),
    Atomic {
        address: MemoryOperand,
        of: Type,
        how: AtomicOperation,
        d: Register,
        a: Register,
        b: Register,
    },
    Branch {
        target: u32,
    },
    BranchTable {
        index: Register,
        targets: Box<[u32]>,
    },
    Call(Box<CallInstruction>),
    Return,
    Exit,
    Barrier {
        kind: BarrierKind,
        d: Register,
        a: Register,
        negated: bool,
    },
    WarpBarrier {
        members: Register,
    },
    Shuffle(Shuffle),
    Vote {
        kind: VoteKind,
        d: Register,
        a: Register,
        negated: bool,
        members: Register,
    },
    Match {
        all: bool,
        d: Register,
        q: Register,
        a: Register,
        members: Register,
    },
    ActiveMask {
        d: Register,
    },
    Clock {
        d: Register,
    },
    /// A fence, hint or pause: one thread runs at a time, so nothing remains to be done.
    Nothing,
    Trap,
}

/// Reads memory.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields say it")]
pub(crate) struct LoadInstruction {
    pub(crate) address: MemoryOperand,
    pub(crate) of: Type,
    pub(crate) lanes: u8,
    /// Whether other threads may write what is read, as with `.volatile`.
    pub(crate) shared: bool,
    pub(crate) d: [Register; 4],
    /// The bits that a destination has.
    pub(crate) mask: u64,
}

/// Writes memory.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields say it")]
pub(crate) struct StoreInstruction {
    pub(crate) address: MemoryOperand,
    pub(crate) of: Type,
    pub(crate) lanes: u8,
    /// Whether other threads may read or write what is written, as with `.volatile`.
    pub(crate) shared: bool,
    pub(crate) sources: [Register; 4],
}

/// The value that an atomic operation stores.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AtomicOperation {
    /// A function of the old value and the operand.
    Apply(Binary),
    /// The second operand, if the old value equals the first.
    CompareAndSwap,
}

/// Calls a function with a body.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields say it")]
pub(crate) struct CallInstruction {
    pub(crate) function: u32,
    /// For each argument, its offsets in the parameters of caller and callee, and its size.
    pub(crate) arguments: Vec<(u32, u32, u32)>,
    /// For each result, its offsets in the parameters of caller and callee, and its size.
    pub(crate) results: Vec<(u32, u32, u32)>,
}

/// The reduction of the predicates at a barrier of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    /// None.
    Synchronize,
    /// The number of threads with a true predicate.
    Count,
    /// Whether all threads have a true predicate.
    All,
    /// Whether a thread has a true predicate.
    Any,
}

/// Exchanges values between the lanes of a warp.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub(crate) struct Shuffle {
    pub(crate) mode: ShuffleMode,
    pub(crate) d: Register,
    /// Whether the source lane is in range.
    pub(crate) p: Register,
    pub(crate) a: Register,
    pub(crate) b: Register,
    pub(crate) c: Register,
    pub(crate) members: Register,
}

/// The rule by which a shuffle finds the source lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// The reduction of the predicates in a vote of a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub(crate) enum VoteKind {
    All,
    Any,
    Uniform,
    Ballot,
}

/// A register whose value depends on the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of PTX")]
pub(crate) enum Special {
    Thread(usize),
    BlockSize(usize),
    Block(usize),
    GridSize(usize),
    Lane,
    Warp,
    WarpCount,
    LaneMaskEqual,
    LaneMaskLess,
    LaneMaskLessEqual,
    LaneMaskGreater,
    LaneMaskGreaterEqual,
    DynamicSharedSize,
}

impl Special {
    /// Returns the register of a name such as `%tid.x`.
    pub(super) fn parse(name: &str) -> Option<Special> {
        let axis = |name: &str| ["x", "y", "z"].iter().position(|&axis| axis == name);
        if let Some((head, tail)) = name.split_once('.') {
            let axis = axis(tail)?;
            return Some(match head {
                "%tid" => Special::Thread(axis),
                "%ntid" => Special::BlockSize(axis),
                "%ctaid" => Special::Block(axis),
                "%nctaid" => Special::GridSize(axis),
                _ => return None,
            });
        }
        Some(match name {
            "%laneid" => Special::Lane,
            "%warpid" => Special::Warp,
            "%nwarpid" => Special::WarpCount,
            "%lanemask_eq" => Special::LaneMaskEqual,
            "%lanemask_lt" => Special::LaneMaskLess,
            "%lanemask_le" => Special::LaneMaskLessEqual,
            "%lanemask_gt" => Special::LaneMaskGreater,
            "%lanemask_ge" => Special::LaneMaskGreaterEqual,
            "%dynamic_smem_size" => Special::DynamicSharedSize,
            _ => return None,
        })
    }
}
