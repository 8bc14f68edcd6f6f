//! [`Fences`]: the processes that a newer process of their id has replaced.

use std::collections::VecDeque;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::limits::RING_SIZE_MAX;

/// The replaced processes, oldest first: at most [`RING_SIZE_MAX`], of which the oldest are
/// forgotten.
#[derive(Debug, Default)]
pub(super) struct Fences {
    replaced: VecDeque<(String, Incarnation)>,
}

impl Fences {
    /// Fences a process of an id.
    pub(super) fn add(&mut self, id: &str, incarnation: Incarnation) {
        if self.contains(id, incarnation) {
            return;
        }
        if self.replaced.len() >= RING_SIZE_MAX {
            self.replaced.pop_front();
        }
        self.replaced.push_back((id.to_owned(), incarnation));
    }

    /// Returns whether a process of an id is fenced.
    pub(super) fn contains(&self, id: &str, incarnation: Incarnation) -> bool {
        self.replaced.iter().any(|(of, fenced)| *fenced == incarnation && of == id)
    }

    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn len(&self) -> usize {
        self.replaced.len()
    }
}
