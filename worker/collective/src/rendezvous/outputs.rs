//! [`Outputs`]: the queue of actions, in which the roster of a ring is one entry for each member.

use std::collections::VecDeque;
use std::sync::Arc;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{RankAddresses, RingFormed, RingMember};

use super::io::RendezvousOutput;

/// The actions that the runtime has not taken yet.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    queue: VecDeque<Queued>,
}

#[derive(Debug)]
enum Queued {
    Output(RendezvousOutput),
    /// The roster for one member. Its messages are made when they are taken: those of all members
    /// of the largest ring would fill a gigabyte.
    Roster {
        connection: u64,
        members: Arc<[RingMember]>,
        next: usize,
        formed: RingFormed,
    },
}

impl Outputs {
    pub(super) fn send(&mut self, connection: u64, message: impl Into<Message>) {
        let message = message.into();
        self.queue.push_back(Queued::Output(RendezvousOutput::Send { connection, message }));
    }

    pub(super) fn close(&mut self, connection: u64) {
        self.queue.push_back(Queued::Output(RendezvousOutput::Close { connection }));
    }

    pub(super) fn probe(&mut self, incarnation: Incarnation, addresses: RankAddresses) {
        let probe = RendezvousOutput::Probe { incarnation, addresses };
        self.queue.push_back(Queued::Output(probe));
    }

    /// Sends a member all members of its ring, and then that the ring has formed.
    pub(super) fn send_roster(
        &mut self,
        connection: u64,
        members: Arc<[RingMember]>,
        formed: RingFormed,
    ) {
        self.queue.push_back(Queued::Roster { connection, members, next: 0, formed });
    }

    /// Returns the next action.
    pub(super) fn poll(&mut self) -> Option<RendezvousOutput> {
        if let Some(Queued::Roster { connection, members, next, .. }) = self.queue.front_mut()
            && let Some(member) = members.get(*next)
        {
            *next += 1;
            let message = member.clone().into();
            return Some(RendezvousOutput::Send { connection: *connection, message });
        }
        Some(match self.queue.pop_front()? {
            Queued::Output(output) => output,
            Queued::Roster { connection, formed, .. } => {
                RendezvousOutput::Send { connection, message: formed.into() }
            }
        })
    }
}
