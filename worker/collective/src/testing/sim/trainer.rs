//! [`Trainer`]: the program of a simulated rank, which trains until the last step.

use pushpull_common::protocol::message::{Collective, RingEnd};

use super::checker::floats;
use super::endpoint::SimOperation;
use super::setting::RingSetting;
use crate::element::ElementKind;
use crate::error::RingError;
use crate::formed_ring::FormedRing;
use crate::planted::RingBug;
use crate::reduction::Reduction;

/// A training on one rank.
///
/// After each formation of a ring the ranks elect the one that is furthest, and it broadcasts its
/// step and its values. Then each step adds the sum of all gradients.
#[derive(Debug)]
pub(super) struct Trainer {
    phase: TrainerPhase,
    pub(super) step: u64,
    pub(super) values: Vec<f32>,
    rings: u64,
    /// Faults of the program.
    pub(super) differs: bool,
    pub(super) leaves: bool,
    /// Why it has ended.
    pub(super) ended: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrainerPhase {
    Joining,
    Electing,
    Receiving,
    Computing,
    Polling,
    Regrouping,
    Reducing,
    Leaving,
}

/// The next action of a program.
#[derive(Debug)]
pub(super) enum TrainerAction {
    Perform(SimOperation),
    Join,
    End(RingEnd),
    Leave,
    /// It computes for a while, and is asked again.
    Compute,
    /// The process ends.
    Exit,
}

impl Trainer {
    pub(super) fn new(elements: usize) -> Trainer {
        Trainer {
            phase: TrainerPhase::Joining,
            step: 0,
            values: vec![0.0; elements],
            rings: 0,
            differs: false,
            leaves: false,
            ended: None,
        }
    }

    pub(super) fn entered(&mut self, setting: &RingSetting, ring: &FormedRing) -> TrainerAction {
        self.rings += 1;
        if setting.planted.has(RingBug::NoBroadcast) && self.rings > 1 {
            return self.next(setting);
        }
        self.phase = TrainerPhase::Electing;
        let vote = (self.step << 8 | u64::from(255 - ring.rank)) as i64;
        TrainerAction::Perform(maximum(vote))
    }

    pub(super) fn performed(
        &mut self,
        setting: &RingSetting,
        ring: &FormedRing,
        result: &[u8],
        joiners: u32,
    ) -> TrainerAction {
        match self.phase {
            TrainerPhase::Electing => {
                let root = 255 - (number(result) & 255) as u32;
                self.phase = TrainerPhase::Receiving;
                let mut tensor = vec![self.step as f32];
                tensor.extend(&self.values);
                if root != ring.rank {
                    tensor.fill(f32::NAN);
                }
                TrainerAction::Perform(SimOperation {
                    collective: Collective::Broadcast { root },
                    kind: ElementKind::F32,
                    reduction: Reduction::Sum,
                    is_gathered: false,
                    tensor: bytes(&tensor),
                })
            }
            TrainerPhase::Receiving => {
                let mut state = floats(result);
                self.step = state.remove(0) as u64;
                self.values = state;
                self.next(setting)
            }
            TrainerPhase::Polling if number(result) > 0 => {
                self.phase = TrainerPhase::Regrouping;
                TrainerAction::End(RingEnd::Regrouped {})
            }
            TrainerPhase::Polling => self.reduce(setting, ring),
            TrainerPhase::Reducing => {
                let sums = floats(result);
                self.values.iter_mut().zip(&sums).for_each(|(value, sum)| *value += sum);
                self.step += 1;
                self.next(setting)
            }
            TrainerPhase::Computing if self.step % 3 == 1 => {
                self.phase = TrainerPhase::Polling;
                TrainerAction::Perform(maximum(i64::from(joiners > 0)))
            }
            TrainerPhase::Computing => self.reduce(setting, ring),
            other => panic!("an operation is done while {other:?}"),
        }
    }

    /// Computing is over.
    pub(super) fn computed(
        &mut self,
        setting: &RingSetting,
        ring: &FormedRing,
        joiners: u32,
    ) -> TrainerAction {
        self.performed(setting, ring, &[], joiners)
    }

    pub(super) fn is_computing(&self) -> bool {
        self.phase == TrainerPhase::Computing
    }

    /// Its operation was dropped: it goes on with the next ring.
    pub(super) fn dropped(&mut self) {
        self.phase = TrainerPhase::Joining;
    }

    pub(super) fn stopped(&mut self, error: &RingError) -> TrainerAction {
        if error.may_shrink() {
            self.phase = TrainerPhase::Joining;
            return TrainerAction::Join;
        }
        self.ended = Some(error.to_string());
        TrainerAction::Exit
    }

    fn next(&mut self, setting: &RingSetting) -> TrainerAction {
        if self.step >= setting.steps || self.leaves {
            self.phase = TrainerPhase::Leaving;
            return TrainerAction::Leave;
        }
        self.phase = TrainerPhase::Computing;
        TrainerAction::Compute
    }

    fn reduce(&mut self, setting: &RingSetting, ring: &FormedRing) -> TrainerAction {
        self.phase = TrainerPhase::Reducing;
        let index = ring.members[ring.rank as usize].index;
        if std::mem::take(&mut self.differs) {
            return TrainerAction::Perform(maximum(7));
        }
        TrainerAction::Perform(SimOperation {
            collective: Collective::ReduceSum {},
            kind: ElementKind::F32,
            reduction: Reduction::Sum,
            is_gathered: setting.is_gathered,
            tensor: bytes(&gradient(index, self.step, setting.elements)),
        })
    }
}

/// The gradient of an index in a step. Its sums round, so that their order shows.
fn gradient(index: u32, step: u64, elements: usize) -> Vec<f32> {
    let mut chance = super::chance::SimChance::new(step << 8 | u64::from(index), 77);
    let value = |draw: u64| (draw % 2_000_001) as f32 / 1_000_003.0 - 0.9;
    (0..elements).map(|_| value(chance.next())).collect()
}

fn maximum(value: i64) -> SimOperation {
    SimOperation {
        collective: Collective::ReduceMax {},
        kind: ElementKind::I64,
        reduction: Reduction::Max,
        is_gathered: true,
        tensor: value.to_le_bytes().to_vec(),
    }
}

fn number(bytes: &[u8]) -> i64 {
    i64::from_le_bytes(bytes.try_into().expect("one element"))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
