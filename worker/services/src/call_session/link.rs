//! The link of a session to one server: its connection, and what is to be sent.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::message::{self, CancelCall, Heartbeat, Release};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Message, limits};
use pushpull_common::rounding::rounded;

use super::pending::PendingRequests;

/// The most calls that a call acknowledges.
pub(super) const ENDED_MAX: usize = limits::CALLS_ENDED_MAX;

/// The first and the longest pause before a link is made again.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// The longest time between the hello and its answer. A server that accepts connections and says
/// nothing is tried again after that.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(5);

/// The link to one server.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) address: String,
    /// The task that the server is, or is expected to be.
    pub(super) task: Option<TaskId>,
    pub(super) status: CallLinkStatus,
    /// The process of the server that this client has last talked to.
    pub(super) server: Option<Incarnation>,
    /// What the server has said.
    pub(super) lease: Duration,
    pub(super) calls_max: usize,
    pub(super) crc: bool,
    /// When the server was last heard, and when it was last sent something.
    pub(super) heard: Instant,
    pub(super) last_sent: Instant,
    /// Since when the server cannot be reached, and the last failure.
    pub(super) failure: Option<(Instant, String)>,
    /// The failures in a row.
    failures: u32,
    pub(super) pending: PendingRequests,
    /// The request whose answer's body arrives.
    pub(super) receiving: Option<RequestId>,
    /// The calls that have left something on the server.
    pub(super) kept: BTreeSet<u64>,
    /// Calls to be cancelled, released, and acknowledged.
    pub(super) cancels: Vec<u64>,
    pub(super) releases: Vec<u64>,
    /// The calls of each release that was sent on the present connection and has no answer.
    releasing: VecDeque<Vec<u64>>,
    pub(super) ended: Vec<u64>,
}

/// How far a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallLinkStatus {
    /// Nothing needs it.
    Idle,
    /// A connection is being made.
    Connecting { connection: u64 },
    /// The hello was sent, and the server has not answered it.
    AwaitingWelcome { connection: u64, until: Instant },
    /// The server has accepted the client.
    Open { connection: u64 },
    /// It waits before it is made again.
    BackOff { until: Instant },
}

impl Link {
    pub(super) fn new(now: Instant, address: String, task: Option<TaskId>) -> Link {
        Link {
            address,
            task,
            status: CallLinkStatus::Idle,
            server: None,
            lease: Duration::from_secs(10),
            calls_max: 1,
            crc: false,
            heard: now,
            last_sent: now,
            failure: None,
            failures: 0,
            pending: PendingRequests::default(),
            receiving: None,
            kept: BTreeSet::new(),
            cancels: Vec::new(),
            releases: Vec::new(),
            releasing: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    /// Returns the name of the server: its task, or its address.
    pub(super) fn task_name(&self) -> String {
        self.task.as_ref().map_or_else(|| self.address.clone(), TaskId::to_string)
    }

    /// Returns whether something waits for the link, or is lost without it.
    pub(super) fn is_needed(&self) -> bool {
        !self.pending.is_empty() || !self.kept.is_empty()
    }

    /// Returns the requests that are to be sent now. The server has few places for calls.
    pub(super) fn next_requests(&self) -> Vec<RequestId> {
        self.pending.next(self.calls_max)
    }

    /// Returns the server that has what a call leaves: 0 if the call was not sent to it yet, `None`
    /// if no server has it any more and no call under way is about to leave it.
    ///
    /// A server remembers how a call has failed until that is acknowledged.
    pub(super) fn holder_of(&self, call: u64) -> Option<Incarnation> {
        let is_there = match self.kept.contains(&call) || self.ended.contains(&call) {
            true => true,
            false => self.pending.call(call)?.was_sent,
        };
        Some(self.server.filter(|_| is_there).unwrap_or_default())
    }

    /// Takes it that nobody needs what calls have left.
    pub(super) fn release(&mut self, calls: Vec<u64>) {
        for call in calls {
            if self.kept.remove(&call) {
                self.releases.push(call);
            }
        }
    }

    /// Takes it that the server cannot be reached now. It is tried again after a pause.
    pub(super) fn back_off(&mut self, now: Instant, reason: String) {
        let pause = BACK_OFF.0.saturating_mul(1 << self.failures.min(16)).min(BACK_OFF.1);
        self.failures += 1;
        let since = self.failure.take().map_or(now, |(since, _)| since);
        self.failure = Some((since, reason));
        self.status = CallLinkStatus::BackOff { until: now + pause };
        self.receiving = None;
        // What the server may not have received is sent again.
        self.releases.extend(self.releasing.drain(..).flatten());
        self.ended.append(&mut self.pending.disconnected());
    }

    /// Takes it that the hello is sent.
    pub(super) fn greeted(&mut self, now: Instant, connection: u64) {
        self.heard = now;
        self.status = CallLinkStatus::AwaitingWelcome { connection, until: now + WELCOME_TIMEOUT };
    }

    /// Returns the connection on which the server has been silent for too long, and how.
    pub(super) fn silence(&self, now: Instant) -> Option<(u64, String)> {
        match self.status {
            CallLinkStatus::AwaitingWelcome { connection, until } if until <= now => {
                Some((connection, format!("no welcome in {WELCOME_TIMEOUT:?}")))
            }
            CallLinkStatus::Open { connection } => {
                let silent = now.saturating_duration_since(self.heard);
                let is_silent = silent > 2 * self.lease;
                is_silent.then(|| (connection, format!("it was silent for {:?}", rounded(&silent))))
            }
            _ => None,
        }
    }

    /// Takes it that the server is there.
    pub(super) fn opened(&mut self, now: Instant, connection: u64) {
        (self.failure, self.failures) = (None, 0);
        (self.heard, self.last_sent) = (now, now);
        self.status = CallLinkStatus::Open { connection };
    }

    /// Takes it that the server has received the first release that had no answer.
    pub(super) fn released(&mut self) {
        self.releasing.pop_front();
    }

    /// Forgets what the server has forgotten.
    pub(super) fn forget_server(&mut self) {
        self.kept.clear();
        self.cancels.clear();
        self.releases.clear();
        self.ended.clear();
    }

    /// Returns the cancellations and releases that are due. They make room for calls.
    pub(super) fn withdrawals(&mut self) -> Vec<Message> {
        let cancel = |call| CancelCall { call }.into();
        let mut due: Vec<Message> = self.cancels.drain(..).map(cancel).collect();
        while !self.releases.is_empty() {
            let some = self.releases.len().min(limits::RELEASES_MAX);
            let calls: Vec<u64> = self.releases.drain(..some).collect();
            self.releasing.push_back(calls.clone());
            due.push(Release { calls: List::new(calls).unwrap_or_default() }.into());
        }
        due
    }

    /// Returns the acknowledgements that no call has carried: they wait for the next one, unless
    /// there are many or none comes. In place of all these messages there is a heartbeat.
    pub(super) fn acknowledgements(&mut self, now: Instant, has_withdrawn: bool) -> Vec<Message> {
        let idle = self.heartbeat_at() <= now;
        if idle || self.ended.len() > ENDED_MAX {
            self.releases.append(&mut self.ended);
        }
        let mut due = self.withdrawals();
        if idle && !has_withdrawn && due.is_empty() {
            due.push(Heartbeat {}.into());
        }
        due
    }

    fn heartbeat_at(&self) -> Instant {
        self.last_sent + self.lease / 5
    }

    /// Returns when the link needs the time; `None` if it does not.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let own = match self.status {
            CallLinkStatus::Idle | CallLinkStatus::Connecting { .. } => None,
            CallLinkStatus::AwaitingWelcome { until, .. } | CallLinkStatus::BackOff { until } => {
                Some(until)
            }
            CallLinkStatus::Open { .. } => Some(
                self.heartbeat_at().min(self.heard + 2 * self.lease + Duration::from_millis(1)),
            ),
        };
        self.pending.deadline().into_iter().chain(own).min()
    }
}

/// Takes the settings of a server.
pub(super) fn settings(link: &mut Link, server: &message::ServerIs) {
    link.lease = Duration::from_millis(server.lease_ms.max(1).into());
    link.calls_max = server.calls_max.max(1) as usize;
    link.crc = server.body_crc == message::BodyCrc::On {};
    link.server = Some(server.incarnation);
}
