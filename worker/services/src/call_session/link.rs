//! The link of a session to one server: its connection, and the messages that it has to send.

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

/// The back-off of a link that is made again: the first and the longest pause.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// The longest time between the hello and its answer. A server that accepts connections and sends
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
    /// The lease from the server's welcome, which also sets `calls_max` and `crc`.
    pub(super) lease: Duration,
    pub(super) calls_max: usize,
    pub(super) crc: bool,
    /// The time at which the last message of the server arrived.
    pub(super) heard: Instant,
    pub(super) last_sent: Instant,
    /// The time since which the server cannot be reached, and the last failure.
    pub(super) failure: Option<(Instant, String)>,
    /// The number of failures in a row, from which the back-off follows.
    failures: u32,
    pub(super) pending: PendingRequests,
    /// The request for whose answer a body arrives.
    pub(super) receiving: Option<RequestId>,
    /// The calls with kept outputs on the server.
    pub(super) kept: BTreeSet<u64>,
    /// The calls to be cancelled. `releases` has those to be released, `ended` those to be
    /// acknowledged.
    pub(super) cancels: Vec<u64>,
    pub(super) releases: Vec<u64>,
    /// The calls of each release that was sent on the present connection and has no answer.
    releasing: VecDeque<Vec<u64>>,
    pub(super) ended: Vec<u64>,
}

/// The status of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallLinkStatus {
    /// The link is not needed.
    Idle,
    /// A connection is being established.
    Connecting { connection: u64 },
    /// The hello was sent, and the server has not answered it.
    AwaitingWelcome { connection: u64, until: Instant },
    /// The server has accepted the client.
    Open { connection: u64 },
    /// The link waits before it connects again.
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

    /// Returns whether a request waits for the link, or kept outputs are lost without it.
    pub(super) fn is_needed(&self) -> bool {
        !self.pending.is_empty() || !self.kept.is_empty()
    }

    /// Returns the requests that are to be sent now, at most as many as the server has places.
    pub(super) fn next_requests(&self) -> Vec<RequestId> {
        self.pending.next(self.calls_max)
    }

    /// Returns the server that has the outputs of a call; 0 if the call was not sent yet. `None`
    /// means that no server has them, and that no call under way can leave them.
    ///
    /// A server remembers the failure of a call until the client acknowledges it.
    pub(super) fn holder_of(&self, call: u64) -> Option<Incarnation> {
        let is_there = match self.kept.contains(&call) || self.ended.contains(&call) {
            true => true,
            false => self.pending.call(call)?.was_sent,
        };
        Some(self.server.filter(|_| is_there).unwrap_or_default())
    }

    /// Records that the outputs of these calls are not needed.
    pub(super) fn release(&mut self, calls: Vec<u64>) {
        for call in calls {
            if self.kept.remove(&call) {
                self.releases.push(call);
            }
        }
    }

    /// Records that the server cannot be reached now. The link connects again after a pause.
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

    /// Records that the hello was sent.
    pub(super) fn greeted(&mut self, now: Instant, connection: u64) {
        self.heard = now;
        self.status = CallLinkStatus::AwaitingWelcome { connection, until: now + WELCOME_TIMEOUT };
    }

    /// Returns the connection on which the server has been silent for too long, and the reason in
    /// words.
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

    /// Records that the server has accepted the client.
    pub(super) fn opened(&mut self, now: Instant, connection: u64) {
        self.failure = None;
        self.failures = 0;
        self.heard = now;
        self.last_sent = now;
        self.status = CallLinkStatus::Open { connection };
    }

    /// Records that the server has received the first unanswered release.
    pub(super) fn released(&mut self) {
        self.releasing.pop_front();
    }

    /// Drops the state of a server that has forgotten this client.
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

    /// Returns the acknowledgements that no call has carried. They wait for the next call, unless
    /// there are more than [`ENDED_MAX`] or a heartbeat is due. A heartbeat is sent only if no
    /// other message is.
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

    /// Returns the time at which the link needs a tick; `None` if it needs none.
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

/// Copies the settings of a server's welcome to its link.
pub(super) fn settings(link: &mut Link, server: &message::ServerIs) {
    link.lease = Duration::from_millis(server.lease_ms.max(1).into());
    link.calls_max = server.calls_max.max(1) as usize;
    link.crc = server.body_crc == message::BodyCrc::On {};
    link.server = Some(server.incarnation);
}
