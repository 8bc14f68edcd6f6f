//! The choices that an input encodes, and the numbers that peers have learned.

use pushpull_common::protocol::{Grant, Message};

/// Boundary values of integers, fields and limits, and their neighbours.
const EDGES: [u64; 22] = [
    0,
    1,
    2,
    8,
    16,
    63,
    64,
    65,
    1 << 20,
    (1 << 20) + 1,
    u32::MAX as u64,
    1 << 32,
    (1 << 55) - 1,
    1 << 55,
    1 << 56,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 15,
    u64::MAX - 7,
    u64::MAX - 1,
    u64::MAX,
];

/// How many numbers of one kind are remembered; older ones are dropped.
const KNOWN_MAX: usize = 8;

/// Bytes that are read as choices. After the last byte every read returns 0.
pub(super) struct Choices<'a> {
    bytes: &'a [u8],
}

/// The numbers that the shard has sent.
#[derive(Debug, Default)]
pub(super) struct KnownNumbers {
    pub(super) tokens: Vec<u64>,
    pub(super) push_slots: Vec<u64>,
    pub(super) epochs: Vec<u64>,
    /// Ids and epochs of coordinators.
    pub(super) coordinators: Vec<u64>,
}

impl<'a> Choices<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Choices<'a> {
        Choices { bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    /// Returns a number below `limit`, which is at most 256.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit.max(1)
    }

    /// Returns true once in `times`; always false when the input is used up.
    pub(super) fn one_in(&mut self, times: usize) -> bool {
        !self.is_empty() && self.below(times) == times - 1
    }

    /// Chooses one of `numbers`; 1 if there are none.
    pub(super) fn of(&mut self, numbers: &[u64]) -> u64 {
        let count = numbers.len();
        if count == 0 { 1 } else { numbers[self.below(count)] }
    }

    /// Chooses any number: a random one, or a known number, a byte or a boundary, at times off by
    /// one.
    pub(super) fn number(&mut self, known: &KnownNumbers) -> u64 {
        let number = match self.below(8) {
            0 => return u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
            1 => self.of(&known.tokens),
            2 => self.of(&known.push_slots),
            3 => self.of(&known.epochs),
            4 => u64::from(self.byte()),
            _ => EDGES[self.below(EDGES.len())],
        };
        match self.below(8) {
            0 => number.wrapping_add(1),
            1 => number.wrapping_sub(1),
            _ => number,
        }
    }
}

impl KnownNumbers {
    /// Remembers the numbers of a message from the shard.
    pub(super) fn learn(&mut self, message: &Message) {
        match message {
            Message::Welcome(welcome) => learn(&mut self.epochs, welcome.client_epoch.0),
            Message::CoordinatorIs(coordinators) => {
                learn(&mut self.coordinators, coordinators.coordinator.0);
                learn(&mut self.coordinators, coordinators.epoch.0);
            }
            Message::Granted(granted) => self.learn_grant(granted.grant),
            Message::Reserved(push_slot) => learn(&mut self.push_slots, push_slot.push_slot.into()),
            Message::SharedPushBuffer(shared) => {
                shared
                    .push_slots
                    .items()
                    .iter()
                    .for_each(|&push_slot| learn(&mut self.push_slots, push_slot.into()));
            }
            Message::PushAnswer(answer) => {
                if answer.push_slot != 0 {
                    learn(&mut self.push_slots, answer.push_slot.into());
                }
                if let Some(grant) = answer.next {
                    self.learn_grant(grant);
                }
            }
            _ => {}
        }
    }

    fn learn_grant(&mut self, grant: Grant) {
        learn(&mut self.tokens, grant.token.0);
        if grant.push_slot != 0 {
            learn(&mut self.push_slots, grant.push_slot.into());
        }
    }
}

fn learn(numbers: &mut Vec<u64>, number: u64) {
    numbers.retain(|&known| known != number);
    numbers.push(number);
    if numbers.len() > KNOWN_MAX {
        numbers.remove(0);
    }
}
