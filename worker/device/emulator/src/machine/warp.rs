//! Instructions of the lanes of a warp together: barriers, shuffles, votes and matches.

use super::fault::DeviceFaultKind;
use super::thread::{SchedulingState, Thread};
use crate::ptx::{Program, PtxOperation, Register, Shuffle, ShuffleMode, VoteKind};

/// Lets the lanes of a warp go on whose instruction is complete. Returns whether one can.
pub(crate) fn resolve(program: &Program, warp: &mut [Thread]) -> bool {
    let mut resolved = false;
    for first in 0..warp.len() {
        if warp[first].state != SchedulingState::AtWarp {
            continue;
        }
        let function = warp[first].function;
        let at = warp[first].at;
        let operation = &program.functions[function].instructions[at].operation;
        let here: u32 = lanes(warp, |thread| {
            thread.state == SchedulingState::AtWarp
                && (thread.function, thread.at) == (function, at)
        });
        let members = match members_of(operation) {
            Some(members) => warp[first].get(members) as u32 & existing(warp),
            // The active lanes are those that wait here once every lane waits somewhere.
            None => here,
        };
        if members & !here != 0 || members & 1 << first == 0 {
            continue;
        }
        apply(operation, warp, members);
        for thread in selected(warp, members) {
            thread.state = SchedulingState::Ready;
            thread.at += 1;
            // What the lanes did before is ordered before what they do next.
            if !matches!(operation, PtxOperation::ActiveMask { .. }) {
                thread.warp_epoch += 1;
            }
        }
        resolved = true;
    }
    resolved
}

/// The fault of a warp in which no lane can go on.
pub(crate) fn stuck(program: &Program, warp: &[Thread], lane: usize) -> DeviceFaultKind {
    let thread = &warp[lane];
    let operation = &program.functions[thread.function].instructions[thread.at].operation;
    let members = members_of(operation).map_or(0, |members| thread.get(members) as u32);
    let arrived = lanes(warp, |other| {
        other.state == SchedulingState::AtWarp
            && (other.function, other.at) == (thread.function, thread.at)
    });
    DeviceFaultKind::DivergentWarp { members: members & existing(warp), arrived }
}

fn members_of(operation: &PtxOperation) -> Option<Register> {
    match operation {
        PtxOperation::WarpBarrier { members }
        | PtxOperation::Vote { members, .. }
        | PtxOperation::Match { members, .. } => Some(*members),
        PtxOperation::Shuffle(shuffle) => Some(shuffle.members),
        _ => None,
    }
}

fn existing(warp: &[Thread]) -> u32 {
    u32::MAX >> (32 - warp.len())
}

fn lanes(warp: &[Thread], mut which: impl FnMut(&Thread) -> bool) -> u32 {
    warp.iter().enumerate().fold(0, |all, (lane, thread)| all | u32::from(which(thread)) << lane)
}

fn selected(warp: &mut [Thread], members: u32) -> impl Iterator<Item = &mut Thread> {
    warp.iter_mut().enumerate().filter(move |(lane, _)| members >> lane & 1 == 1).map(|(_, t)| t)
}

fn apply(operation: &PtxOperation, warp: &mut [Thread], members: u32) {
    match operation {
        PtxOperation::Shuffle(how) => shuffle(*how, warp, members),
        &PtxOperation::Vote { kind, d, a, negated, .. } => {
            let ballot = members & lanes(warp, |thread| (thread.get(a) & 1 == 1) != negated);
            let value = match kind {
                VoteKind::Ballot => u64::from(ballot),
                VoteKind::All => u64::from(ballot == members),
                VoteKind::Any => u64::from(ballot != 0),
                VoteKind::Uniform => u64::from(ballot == members || ballot == 0),
            };
            selected(warp, members).for_each(|thread| thread.set(d, value));
        }
        &PtxOperation::Match { all, d, q, a, .. } => {
            let values: Vec<u64> = warp.iter().map(|thread| thread.get(a)).collect();
            for thread in selected(warp, members) {
                let own = values[thread.lane() as usize];
                let equal = members
                    & values
                        .iter()
                        .enumerate()
                        .fold(0, |all, (lane, &value)| all | u32::from(value == own) << lane);
                let matches = equal == members;
                let value = if all && !matches { 0 } else { equal };
                thread.set(d, u64::from(value));
                thread.set(q, u64::from(matches));
            }
        }
        &PtxOperation::ActiveMask { d } => {
            selected(warp, members).for_each(|thread| thread.set(d, u64::from(members)));
        }
        _ => {}
    }
}

fn shuffle(how: Shuffle, warp: &mut [Thread], members: u32) {
    let values: Vec<u64> = warp.iter().map(|thread| thread.get(how.a)).collect();
    for thread in selected(warp, members) {
        let lane = thread.lane();
        let by = thread.get(how.b) as u32 & 31;
        let control = thread.get(how.c) as u32;
        let clamp = control & 31;
        let segment = control >> 8 & 31;
        let least = lane & segment;
        let greatest = least | clamp & !segment;
        let (source, in_range) = match how.mode {
            ShuffleMode::Up => {
                let source = i64::from(lane) - i64::from(by);
                // For this mode the clamp is the least lane of the segment.
                (source as u32, source >= i64::from(greatest))
            }
            ShuffleMode::Down => (lane + by, lane + by <= greatest),
            ShuffleMode::Butterfly => (lane ^ by, lane ^ by <= greatest),
            ShuffleMode::Index => {
                let source = least | by & !segment;
                (source, source <= greatest)
            }
        };
        let source = if in_range { source } else { lane };
        // The value of a lane that takes no part is not defined: poison shows its use.
        let taken = members >> source & 1 == 1 && (source as usize) < values.len();
        let value = if taken { values[source as usize] } else { 0xffff_ffff };
        thread.set(how.d, value);
        thread.set(how.p, u64::from(in_range));
    }
}
