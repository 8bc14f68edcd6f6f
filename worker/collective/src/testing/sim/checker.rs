//! [`RingChecker`]: the rules of rings, checked against everything that all ranks see.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use pushpull_common::protocol::message::{Collective, RingEnd};

use super::endpoint::SimOperation;
use super::setting::LEASE;
use crate::formed_ring::FormedRing;

/// A ring, by its rendezvous and its epoch.
pub(super) type RingKey = (u64, u64);

/// What the ranks of one ring have seen.
#[derive(Debug, Default)]
struct RingRecord {
    members: Vec<u32>,
    /// The rings that its members were in before.
    parents: BTreeSet<RingKey>,
    serving: Option<u32>,
    formed_at: Option<Instant>,
    first_done: Option<Instant>,
    operations: BTreeMap<u64, OperationRecord>,
    end: Option<RingEnd>,
    /// The values of the training after each step.
    states: BTreeMap<u64, Vec<u32>>,
}

#[derive(Debug, Default)]
struct OperationRecord {
    contributions: BTreeMap<u32, SimOperation>,
    began: Option<Instant>,
    result: Option<Vec<u8>>,
}

/// The counts of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingFigures {
    pub(super) rings: u64,
    pub(super) losses: u64,
    pub(super) shrinks: u64,
    pub(super) late_joins: u64,
    pub(super) returns: u64,
    pub(super) sums_checked: u64,
    pub(super) finished: u64,
    pub(super) unfinished: u64,
    pub(super) events: u64,
}

/// Checks the rules of rings; every method panics if one is broken.
#[derive(Debug, Default)]
pub(super) struct RingChecker {
    rings: BTreeMap<RingKey, RingRecord>,
    /// The index of each id at each rendezvous.
    indices: BTreeMap<(u64, String), u32>,
    pub(super) figures: RingFigures,
}

impl RingChecker {
    pub(super) fn entered(
        &mut self,
        now: Instant,
        ring: &FormedRing,
        id: &str,
        before: Option<RingKey>,
    ) {
        let key = (ring.rendezvous, ring.epoch);
        let members: Vec<u32> = ring.members.iter().map(|place| place.index).collect();
        let record = self.rings.entry(key).or_default();
        if record.formed_at.is_none() {
            record.formed_at = Some(now);
            record.members = members.clone();
            record.serving = ring.serving;
            self.figures.rings += 1;
        }
        record.parents.extend(before);
        assert_eq!(record.members, members, "two members know other members of ring {key:?}");
        assert!(members.is_sorted_by(|a, b| a < b), "indices {members:?}");
        let index = members[ring.rank as usize];
        let known = *self.indices.entry((ring.rendezvous, id.to_owned())).or_insert(index);
        assert_eq!(known, index, "member {id:?} has not got its index back");
    }

    /// Forgets the index of a member that has left.
    pub(super) fn left(&mut self, id: &str) {
        self.indices.retain(|(_, of), _| of != id);
    }

    pub(super) fn began(
        &mut self,
        now: Instant,
        ring: &FormedRing,
        number: u64,
        operation: SimOperation,
    ) {
        let key = (ring.rendezvous, ring.epoch);
        let record = self.rings.get_mut(&key).expect("a member has entered it");
        let of = record.operations.entry(number).or_default();
        of.began.get_or_insert(now);
        of.contributions.insert(ring.rank, operation);
        let began = of.began;
        let is_whole = of.contributions.len() == record.members.len();
        let formed_at = record.formed_at;
        if is_whole {
            // Another run of the job, whose members are all new, is another chain.
            let chain = self.chain(key);
            let others = self.rings.iter().filter(|(other, _)| **other != key);
            for (other, newer) in
                others.filter(|(other, _)| !chain.is_disjoint(&self.chain(**other)))
            {
                let has_gone_on = newer.formed_at > formed_at
                    && newer.first_done.is_some_and(|done| began.is_some_and(|began| done < began));
                assert!(!has_gone_on, "ring {key:?} goes on while {other:?} does");
            }
        }
    }

    /// Returns a ring and all rings before it.
    fn chain(&self, key: RingKey) -> BTreeSet<RingKey> {
        let mut chain = BTreeSet::new();
        let mut next = vec![key];
        while let Some(key) = next.pop() {
            if chain.insert(key) {
                next.extend(self.rings.get(&key).iter().flat_map(|record| &record.parents));
            }
        }
        chain
    }

    pub(super) fn performed(
        &mut self,
        now: Instant,
        ring: &FormedRing,
        number: u64,
        result: &[u8],
    ) {
        let key = (ring.rendezvous, ring.epoch);
        let record = self.rings.get_mut(&key).expect("a member has entered it");
        let ranks = record.members.len() as u32;
        record.first_done.get_or_insert(now);
        let of = record.operations.get_mut(&number).expect("it has begun");
        let expected = of.result.get_or_insert_with(|| {
            // A broadcast waits for its root alone.
            let any = of.contributions.values().next().expect("this rank has begun it");
            if let Collective::Broadcast { root } = any.collective {
                let of_root = of.contributions.get(&root).expect("the root has begun it");
                return of_root.tensor.clone();
            }
            let missing = (0..ranks).find(|rank| !of.contributions.contains_key(rank));
            assert_eq!(missing, None, "operation {number} is done without a rank");
            reference(&of.contributions)
        });
        assert_eq!(
            expected.as_slice(),
            result,
            "operation {number} of {key:?} on rank {}",
            ring.rank
        );
        self.figures.sums_checked += 1;
    }

    /// Checks the values of the training after a step.
    pub(super) fn stepped(&mut self, ring: &FormedRing, step: u64, values: &[f32]) {
        let key = (ring.rendezvous, ring.epoch);
        let record = self.rings.get_mut(&key).expect("a member has entered it");
        let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        let known = record.states.entry(step).or_insert_with(|| bits.clone());
        assert_eq!(*known, bits, "two ranks of {key:?} have other values at step {step}");
    }

    pub(super) fn heard(&mut self, key: RingKey, end: &RingEnd, rank: u32) {
        let Some(record) = self.rings.get_mut(&key) else { return };
        if let RingEnd::Lost { rank: lost, silent_ms, detail, .. } = end {
            let is_silent = detail.as_str().is_empty();
            assert!(
                !is_silent || *silent_ms >= LEASE.as_millis() as u64,
                "rank {lost} is lost after {silent_ms} ms"
            );
            self.figures.losses += 1;
            // A member finds the loss of its rendezvous by itself.
            if record.serving == Some(*lost) {
                return;
            }
        }
        let known = record.end.get_or_insert_with(|| end.clone());
        assert_eq!(known, end, "rank {rank} of {key:?} has heard of another end");
    }
}

/// Returns the result of an operation, computed in the plainest way.
fn reference(contributions: &BTreeMap<u32, SimOperation>) -> Vec<u8> {
    let first = &contributions[&0];
    let all: Vec<&[u8]> = contributions.values().map(|of| of.tensor.as_slice()).collect();
    let differs = contributions.values().any(|of| of.collective != first.collective);
    assert!(!differs, "operations that differ are done: {contributions:?}");
    match first.collective {
        Collective::ReduceMax {} => {
            let of = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("one element"));
            let max = all.iter().map(|bytes| of(bytes)).max();
            max.expect("a ring has members").to_le_bytes().to_vec()
        }
        _ => {
            let values: Vec<Vec<f32>> = all.iter().map(|bytes| floats(bytes)).collect();
            let ranks = values.len();
            let elements = values[0].len();
            let mut sums = Vec::new();
            // Chunk c has one element more if c is below the remainder.
            for chunk in 0..ranks {
                let length = elements / ranks + usize::from(chunk < elements % ranks);
                for _ in 0..length {
                    let at = sums.len();
                    let mut sum = values[chunk][at];
                    for step in 1..ranks {
                        sum += values[(chunk + step) % ranks][at];
                    }
                    sums.push(sum);
                }
            }
            sums.iter().flat_map(|sum| sum.to_le_bytes()).collect()
        }
    }
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words.map(|word| f32::from_le_bytes(word.try_into().expect("four bytes"))).collect()
}

impl RingFigures {
    pub(super) fn add(&mut self, other: &RingFigures) {
        self.rings += other.rings;
        self.losses += other.losses;
        self.shrinks += other.shrinks;
        self.late_joins += other.late_joins;
        self.returns += other.returns;
        self.sums_checked += other.sums_checked;
        self.finished += other.finished;
        self.unfinished += other.unfinished;
        self.events += other.events;
    }
}

/// Prints the counts as members of a JSON object.
impl std::fmt::Display for RingFigures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [
            ("events", self.events),
            ("rings", self.rings),
            ("losses", self.losses),
            ("shrinks", self.shrinks),
            ("late_joins", self.late_joins),
            ("returns", self.returns),
            ("sums_checked", self.sums_checked),
            ("finished", self.finished),
            ("unfinished", self.unfinished),
        ];
        let words = all.map(|(name, count)| format!("\"{name}\":{count}"));
        f.write_str(&words.join(","))
    }
}
