//! [`DeviceFault`]: what a kernel did wrong, and where.

use std::fmt;

use crate::ptx::Space;

/// A fault of a kernel, with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFault {
    /// The kind of the fault.
    pub kind: DeviceFaultKind,
    /// The location; `None` for a fault of the host.
    pub location: Option<FaultLocation>,
}

/// The place of a fault in a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultLocation {
    /// The name of the kernel.
    pub kernel: String,
    /// The index of the block.
    pub block: [u32; 3],
    /// The index of the thread in its block.
    pub thread: [u32; 3],
    /// The line of the module's text, from 1.
    pub line: u32,
    /// The text of the instruction.
    pub text: String,
}

/// The other thread of a race, by linear indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields say it")]
pub struct Other {
    pub block: u32,
    pub thread: u32,
    pub wrote: bool,
}

/// What was wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields say it")]
pub enum DeviceFaultKind {
    /// An address outside of every allocation, with the nearest one.
    OutOfBounds { space: Space, address: u64, size: usize, allocation: Option<(u64, usize)> },
    /// An address in an allocation that has been freed.
    UseAfterFree { address: u64, size: usize, allocation: (u64, usize) },
    /// A read of a byte that was never written.
    Uninitialized { space: Space, address: u64 },
    /// An address that is not a multiple of the size.
    Misaligned { space: Space, address: u64, size: usize },
    /// A write of a constant.
    ReadOnly { address: u64 },
    /// Two accesses that nothing orders.
    Race { space: Space, address: u64, other: Other },
    /// A barrier that not every thread of the block has reached.
    DivergentBarrier { waiting: usize, exited: usize, elsewhere: usize },
    /// An instruction of a warp that not every lane of its mask has reached.
    DivergentWarp { members: u32, arrived: u32 },
    /// More instructions than a launch may execute.
    StepBudget { steps: u64 },
    /// A division of integers by zero.
    DivisionByZero,
    /// The instruction `trap`.
    Trap,
    /// Too many calls inside each other.
    CallDepth { depth: usize },
    /// An indexed branch beyond its table.
    BranchIndex { index: u64 },
    /// A copy whose source and target overlap.
    OverlappingCopy { to: u64, from: u64, size: usize },
    /// The host did what the driver does not allow.
    Host { message: String },
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(location) = &self.location {
            let [bx, by, bz] = location.block;
            let [x, y, z] = location.thread;
            write!(f, " in kernel {}, block ({bx}, {by}, {bz})", location.kernel)?;
            write!(f, ", thread ({x}, {y}, {z}), line {}: {}", location.line, location.text)?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceFaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceFaultKind::OutOfBounds { space, address, size, allocation } => {
                write!(f, "out of bounds: {size} bytes at {space:?} {address:#x}")?;
                match allocation {
                    Some((base, length)) => {
                        let offset = i128::from(*address) - i128::from(*base);
                        write!(f, ", offset {offset} of an allocation of {length} bytes")
                    }
                    None => Ok(()),
                }
            }
            DeviceFaultKind::UseAfterFree { address, size, allocation: (base, length) } => write!(
                f,
                "use after free: {size} bytes at {address:#x}, offset {} of a freed allocation of \
                 {length} bytes",
                address - base
            ),
            DeviceFaultKind::Uninitialized { space, address } => {
                write!(f, "read of uninitialized memory at {space:?} {address:#x}")
            }
            DeviceFaultKind::Misaligned { space, address, size } => {
                write!(f, "misaligned access of {size} bytes at {space:?} {address:#x}")
            }
            DeviceFaultKind::ReadOnly { address } => {
                write!(f, "write of a constant at {address:#x}")
            }
            DeviceFaultKind::Race { space, address, other } => {
                let did = if other.wrote { "wrote" } else { "read" };
                let Other { block, thread, .. } = other;
                write!(
                    f,
                    "race at {space:?} {address:#x}: thread {thread} of block {block} {did} it"
                )
            }
            DeviceFaultKind::DivergentBarrier { waiting, exited, elsewhere } => write!(
                f,
                "divergent barrier: {waiting} threads wait, {exited} have exited, {elsewhere} wait \
                 elsewhere"
            ),
            DeviceFaultKind::DivergentWarp { members, arrived } => {
                write!(f, "divergent warp: of lanes {members:#010x} only {arrived:#010x} arrived")
            }
            DeviceFaultKind::StepBudget { steps } => {
                write!(f, "step budget: more than {steps} instructions, perhaps an endless loop")
            }
            DeviceFaultKind::DivisionByZero => write!(f, "division by zero"),
            DeviceFaultKind::Trap => write!(f, "trap"),
            DeviceFaultKind::CallDepth { depth } => write!(f, "{depth} calls inside each other"),
            DeviceFaultKind::BranchIndex { index } => {
                write!(f, "branch index {index} beyond its table")
            }
            DeviceFaultKind::OverlappingCopy { to, from, size } => {
                write!(f, "copy of {size} bytes from {from:#x} to {to:#x} overlaps")
            }
            DeviceFaultKind::Host { message } => write!(f, "{message}"),
        }
    }
}
