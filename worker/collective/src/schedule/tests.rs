//! Walks every interleaving of small rings.

use std::collections::HashSet;

use super::*;
use crate::transfer::{Part, Transfer};

#[test]
fn chunks_cover_a_tensor_in_order() {
    for elements in [0, 1, 2, 6, 7, 8, 100] {
        for ranks in 1..=9 {
            let chunks = Chunks::new(elements, 4, ranks);
            let mut end = 0;
            for chunk in 0..ranks {
                let range = chunks.elements(chunk);
                assert_eq!(range.start, end, "chunk {chunk} of {elements} elements, {ranks} ranks");
                assert!(range.len().abs_diff(elements / ranks as usize) <= 1);
                assert_eq!(chunks.bytes(chunk), 4 * range.start..4 * range.end);
                end = range.end;
            }
            assert_eq!(end, elements);
        }
    }
}

/// The history of one element: the ranks whose contributions it has, in the order of the fold.
type History = Vec<u8>;

/// A ring of ranks that exchange elements of one byte over links with a bounded number of parts.
#[derive(Clone)]
struct World {
    transfers: Vec<Transfer>,
    /// For each rank and element its history.
    memory: Vec<Vec<History>>,
    /// The parts on the link from each rank to its successor.
    links: Vec<Vec<(Part, Vec<History>)>>,
    /// The sent and received bytes of each rank, which determine all the rest.
    counts: Vec<(u16, u16)>,
}

const PART: usize = 2;
const LINK_PARTS: usize = 1;

impl World {
    fn new(kind: ScheduleKind, ranks: u32, elements: usize) -> World {
        let chunks = Chunks::new(elements, 1, ranks);
        let transfer = |rank| Transfer::new(Schedule::new(kind, rank, ranks, chunks));
        World {
            transfers: (0..ranks).map(transfer).collect(),
            memory: (0..ranks).map(|rank| vec![vec![rank as u8]; elements]).collect(),
            links: vec![Vec::new(); ranks as usize],
            counts: vec![(0, 0); ranks as usize],
        }
    }

    /// Rank `rank` sends a part, if it can.
    fn send(&mut self, rank: usize) -> bool {
        if self.links[rank].len() == LINK_PARTS {
            return false;
        }
        let Some(part) = self.transfers[rank].next_part(PART) else { return false };
        let values = self.memory[rank][part.bytes.clone()].to_vec();
        self.transfers[rank].sent(values.len());
        self.counts[rank].0 += values.len() as u16;
        self.links[rank].push((part, values));
        true
    }

    /// Rank `rank` takes a part from its predecessor, if there is one.
    fn receive(&mut self, rank: usize) -> bool {
        let ranks = self.transfers.len();
        let link = &mut self.links[(rank + ranks - 1) % ranks];
        if link.is_empty() {
            return false;
        }
        let (part, values) = link.remove(0);
        let (expected, arrival) = self.transfers[rank].expected().expect("nothing is expected");
        assert_eq!((part.pass, part.offset), (expected.pass, expected.offset));
        assert!(part.bytes.len() <= expected.bytes.len());
        for (at, value) in (expected.bytes.start..).zip(&values) {
            let own = &mut self.memory[rank][at];
            match arrival {
                Arrival::Store => own.clone_from(value),
                Arrival::Fold { is_last } => {
                    *own = [&value[..], own].concat();
                    assert_eq!(is_last, own.len() == ranks, "{own:?}");
                }
            }
        }
        self.transfers[rank].received(values.len());
        self.counts[rank].1 += values.len() as u16;
        true
    }

    fn is_done(&self) -> bool {
        self.transfers.iter().all(Transfer::is_done) && self.links.iter().all(Vec::is_empty)
    }
}

/// Walks all interleavings of a ring. Returns the number of its states.
fn explore(kind: ScheduleKind, ranks: u32, elements: usize) -> usize {
    let first = World::new(kind, ranks, elements);
    let mut seen = HashSet::from([first.counts.clone()]);
    let mut open = vec![first];
    let mut ends = 0;
    while let Some(world) = open.pop() {
        let mut moved = false;
        for rank in 0..ranks as usize {
            for step in [World::send, World::receive] {
                let mut next = world.clone();
                if step(&mut next, rank) {
                    moved = true;
                    if seen.insert(next.counts.clone()) {
                        open.push(next);
                    }
                }
            }
        }
        if !moved {
            assert!(
                world.is_done(),
                "{kind:?}: {ranks} ranks with {elements} elements stand still"
            );
            check_result(kind, ranks, &world.memory);
            ends += 1;
        }
    }
    assert_eq!(ends, 1, "{kind:?}: every interleaving ends in one state");
    seen.len()
}

/// Checks the history of every element in every rank's memory.
fn check_result(kind: ScheduleKind, ranks: u32, memory: &[Vec<History>]) {
    let elements = memory[0].len();
    let chunks = Chunks::new(elements, 1, ranks);
    let from =
        |rank: u32| (0..ranks).map(|step| ((rank + step) % ranks) as u8).collect::<History>();
    for chunk in 0..ranks {
        for at in chunks.elements(chunk) {
            for (rank, memory) in memory.iter().enumerate() {
                let expected = match kind {
                    ScheduleKind::AllReduce => from(chunk),
                    ScheduleKind::ReduceScatter if rank as u32 == chunk => {
                        from((chunk + 1) % ranks)
                    }
                    ScheduleKind::ReduceScatter => continue,
                    ScheduleKind::Gather => vec![chunk as u8],
                    ScheduleKind::Broadcast { root } => vec![root as u8],
                };
                assert_eq!(memory[at], expected, "{kind:?}: element {at} of rank {rank}");
            }
        }
    }
}

fn kinds(ranks: u32) -> Vec<ScheduleKind> {
    let broadcasts = (0..ranks).map(|root| ScheduleKind::Broadcast { root });
    let others = [ScheduleKind::AllReduce, ScheduleKind::ReduceScatter, ScheduleKind::Gather];
    others.into_iter().chain(broadcasts).collect()
}

#[test]
fn every_interleaving_of_a_small_ring_gives_the_same_result() {
    let mut states = 0;
    for ranks in 1..=4 {
        for elements in [0, 1, 2, 3, 5, 8, 9] {
            for kind in kinds(ranks) {
                // The blocks of a gather have one length.
                if kind != ScheduleKind::Gather || elements % ranks as usize == 0 {
                    states += explore(kind, ranks, elements);
                }
            }
        }
    }
    println!("{states} states of rings of up to 4 ranks");
}

#[test]
fn every_interleaving_of_a_ring_of_eight_gives_the_same_result() {
    let thorough = std::env::var_os("PUSHPULL_THOROUGH").is_some();
    let most = if thorough { 8 } else { 6 };
    for ranks in 5..=most {
        for kind in kinds(ranks) {
            let states = explore(kind, ranks, ranks as usize);
            println!("{kind:?}: {states} states of {ranks} ranks");
        }
    }
}
