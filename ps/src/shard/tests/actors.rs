//! The clients of the random model, and their pushes.

use pushpull_common::ids::{RequestId, TokenId};
use pushpull_common::protocol::Grant;

use super::peers::{Peer, Push, bytes_of, f32s, worker};
use super::random::Random;
use super::world::ConnectionId;

/// Elements of the ledger; must exceed the number of pushes in one run.
pub(super) const LEDGER: usize = 256;
pub(super) const DENSE: usize = 3;

/// A push whose outcome its client does not know yet.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) push: Push,
    pub(super) entry: usize,
    /// The parts in the order they are sent.
    pub(super) parts: Vec<(u64, Vec<u8>)>,
    /// How many of them have been sent.
    pub(super) sent: usize,
    pub(super) request: Option<RequestId>,
}

#[derive(Debug)]
pub(super) struct Actor {
    pub(super) peer: Peer,
    pub(super) line: Option<ConnectionId>,
    pub(super) sequence: u64,
    pub(super) newest: TokenId,
    pub(super) asked: Option<RequestId>,
    pub(super) token: Option<Grant>,
    pub(super) reserving: Option<RequestId>,
    pub(super) push_slot: u32,
    pub(super) pending: Option<Pending>,
    /// Settled pushes, which the model resends at random. All of them are in the push window: one
    /// run has fewer pushes than it holds.
    pub(super) settled: Vec<Push>,
}

pub(super) fn actor(task: u32) -> Actor {
    Actor {
        peer: worker(task),
        line: None,
        sequence: 0,
        newest: TokenId(0),
        asked: None,
        token: None,
        reserving: None,
        push_slot: 0,
        pending: None,
        settled: Vec::new(),
    }
}

impl Actor {
    pub(super) fn take(&mut self, grant: Grant) {
        self.newest = self.newest.max(grant.token);
        self.token = Some(grant);
        if grant.push_slot != 0 {
            self.push_slot = grant.push_slot;
        }
    }
}

pub(super) fn dense_bytes() -> usize {
    (4 * DENSE).next_multiple_of(8)
}

/// Returns the gradient of a push: partitions in random order, cut into parts of random size.
pub(super) fn random_parts(entry: usize, random: &mut Random) -> Vec<(u64, Vec<u8>)> {
    let dense = bytes_of(&[-1_f32; DENSE]);
    let mut ledger = vec![0_f32; LEDGER];
    ledger[entry] = -1.0;
    let ledger = bytes_of(&ledger);
    let mut partitions = vec![(0, dense), (dense_bytes() as u64, ledger)];
    if random.one_in(2) {
        partitions.reverse();
    }
    let mut parts = Vec::new();
    for (mut offset, body) in partitions {
        let mut rest = &body[..];
        while !rest.is_empty() {
            let words = 1 + random.below(rest.len() as u64 / 8) as usize;
            let (head, tail) = rest.split_at(8 * words);
            parts.push((offset, head.to_vec()));
            offset += head.len() as u64;
            rest = tail;
        }
    }
    parts
}

/// Checks that the values are the sum of whole pushes, and returns how many.
pub(super) fn check_whole(values: &[u8]) -> f32 {
    let values = f32s(values);
    let (dense, ledger) = values.split_at(dense_bytes() / 4);
    assert!(dense[..DENSE].iter().all(|&value| value == dense[0]), "torn: {dense:?}");
    assert_eq!(ledger.iter().sum::<f32>(), dense[0], "`ledger` and `dense` count the same pushes");
    dense[0]
}
