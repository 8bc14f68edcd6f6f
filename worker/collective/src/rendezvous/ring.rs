//! [`Ring`]: the members of one epoch, from its formation to its end.

use std::time::Instant;

use pushpull_common::protocol::limits;
use pushpull_common::protocol::message::RingEnd;
use pushpull_common::protocol::wire::Text;

/// The present ring, or the last one once it is over.
///
/// Invariant: every member of a ring that runs is connected.
#[derive(Debug)]
pub(super) struct Ring {
    formed_at: Instant,
    epoch: u64,
    /// The members in order of their ranks.
    seats: Vec<Seat>,
    is_over: bool,
}

/// A member of a ring.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    /// The stable id.
    pub(super) id: String,
    /// The stable index.
    pub(super) index: u32,
    /// The host, for reports.
    pub(super) host: Text<{ limits::HOST_BYTES_MAX }>,
    /// The connection; `None` once the member is lost or has left.
    pub(super) connection: Option<u64>,
}

impl Ring {
    /// Creates a ring of these members in order of their ranks.
    pub(super) fn new(now: Instant, epoch: u64, seats: Vec<Seat>) -> Ring {
        Ring { formed_at: now, epoch, seats, is_over: false }
    }

    pub(super) fn formed_at(&self) -> Instant {
        self.formed_at
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of members that the ring has formed with.
    pub(super) fn size(&self) -> u32 {
        self.seats.len() as u32
    }

    pub(super) fn is_running(&self) -> bool {
        !self.is_over
    }

    pub(super) fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// Yields the members that are connected, with their connections.
    pub(super) fn live(&self) -> impl Iterator<Item = (u64, &Seat)> {
        self.seats.iter().filter_map(|seat| Some((seat.connection?, seat)))
    }

    /// Returns the rank of a connection.
    pub(super) fn rank(&self, connection: u64) -> Option<u32> {
        let rank = self.seats.iter().position(|seat| seat.connection == Some(connection))?;
        Some(rank as u32)
    }

    /// Returns the member of a connection.
    pub(super) fn seat(&self, connection: u64) -> Option<&Seat> {
        self.seats.iter().find(|seat| seat.connection == Some(connection))
    }

    /// Removes the connection of a member. Returns its rank and its host.
    pub(super) fn vacate(
        &mut self,
        connection: u64,
    ) -> Option<(u32, Text<{ limits::HOST_BYTES_MAX }>)> {
        let rank = self.rank(connection)?;
        let seat = self.seats.get_mut(rank as usize)?;
        seat.connection = None;
        Some((rank, seat.host.clone()))
    }

    /// Ends the ring. Returns whether it ran until now: the first end is the one that counts.
    pub(super) fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.is_over, true)
    }

    /// Returns the fault of an end that a member reports; `None` if it may.
    pub(super) fn fault_of(&self, reporter: u32, end: &RingEnd) -> Option<String> {
        let size = self.size();
        match end {
            RingEnd::Regrouped {} => None,
            RingEnd::GivenUp { rank, .. } if *rank == reporter => None,
            RingEnd::GivenUp { rank, .. } => {
                Some(format!("rank {reporter} reports that rank {rank} has given up"))
            }
            RingEnd::Difference { rank, other_rank, .. } => {
                let exist = *rank < size && *other_rank < size && rank != other_rank;
                let fault = || {
                    format!(
                        "a difference is between two of {size} ranks, not {rank} and {other_rank}"
                    )
                };
                (!exist).then(fault)
            }
            RingEnd::Lost { .. } | RingEnd::Left { .. } => {
                Some("losses and leaves are reported by the rendezvous".to_owned())
            }
        }
    }
}
