//! A shard's connection to the step owner's shard for as long as the shard serves. The shard
//! reports its held pushes, receives the decisions, and answers recalls of tokens.

use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_common::ids::{ClientEpoch, ShardId};
use pushpull_common::protocol::message::Heartbeat;
use pushpull_common::protocol::{BodyStamp, Envelope, Features, Message, Refusal, encode_for};
use pushpull_net::Connector;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::peer::{NoWelcome, PeerConnection};
use super::shard_thread::ShardCore;
use crate::event::Event;
use crate::peer_hello::PeerHello;
use crate::shard::ShardInput;

/// The address of the step owner's shard, and the identity of the shard that connects.
#[derive(Clone, Debug)]
pub(super) struct OwnerAddress {
    pub(super) peer_hello: PeerHello,
    pub(super) address: String,
    pub(super) shard: ShardId,
    /// The shard that connects.
    pub(super) own: ShardId,
    /// A connection that is silent for this long is closed.
    pub(super) lease: Duration,
}

/// The most unsent frames: a few words for each held push, repeated periodically. A step owner that
/// leaves this many unread is treated as lost.
const UNSENT_MAX: usize = 8192;

/// Encoded frames that wait to be sent to the step owner, back to back.
#[derive(Debug, Default)]
pub(super) struct UnsentFrames {
    frames: RefCell<Vec<u8>>,
    count: Cell<usize>,
    /// The features that are agreed with the step owner.
    features: Cell<Features>,
    added: Notify,
}

impl UnsentFrames {
    pub(super) fn add(&self, envelope: &Envelope, message: &Message) {
        let features = self.features.get();
        encode_for(features, &mut self.frames.borrow_mut(), envelope, message, BodyStamp::plain(0));
        self.count.set(self.count.get() + 1);
        self.added.notify_one();
    }

    /// Moves the frames into `frames`, replacing its content, and returns how many there were.
    fn take(&self, frames: &mut Vec<u8>) -> usize {
        frames.clear();
        std::mem::swap(frames, &mut self.frames.borrow_mut());
        self.count.take()
    }
}

/// The first and the largest delay before the next attempt.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Maintains the connection and reconnects with exponential back-off.
pub(super) async fn run(core: Rc<ShardCore>, owner: OwnerAddress) {
    let mut limit = BACK_OFF.0;
    let mut absence = Absence::new(owner.own, owner.lease, Instant::now());
    let connector = owner.peer_hello.connector(&owner.address, owner.shard);
    loop {
        let ended = match connect(&connector, &owner, core.newest_epoch()).await {
            Err(error) => Err(error),
            Ok((connection, epoch)) => {
                limit = BACK_OFF.0;
                core.emit(absence.ends(Instant::now()));
                core.unsent().take(&mut Vec::new());
                core.unsent().features.set(connection.features());
                core.handle(ShardInput::OwnerTime { epoch });
                core.handle(ShardInput::OwnerLink { up: true });
                core.handle(ShardInput::Tick);
                // However it ends, the loop reconnects.
                let ended = serve(&core, connection, owner.lease).await.map_err(LinkEnd::Lost);
                absence = Absence::new(owner.own, owner.lease, Instant::now());
                core.handle(ShardInput::OwnerLink { up: false });
                ended
            }
        };
        if let Err(end) = ended {
            core.emit(absence.lasts(Instant::now(), end));
        }
        // Full jitter: shards that lose one owner do not all reconnect at once.
        let share = RandomState::new().hash_one(0_u8) % 1000;
        tokio::time::sleep(limit * share as u32 / 1000).await;
        limit = (limit * 2).min(BACK_OFF.1);
    }
}

/// The reason why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LinkEnd {
    /// The name of the step owner has no address, because of a typing error or because the server is
    /// not known yet; or the step owner refuses this server for its settings.
    Misconfigured(String),
    /// The step owner was not reached, or its connection was lost.
    Lost(String),
}

/// A period without a connection.
///
/// It is reported once it has lasted for a lease: a step owner that restarts is back sooner, and
/// one that ends with the training is not missed. A name without an address and a refusal for
/// different settings are reported at once.
#[derive(Debug)]
struct Absence {
    shard: ShardId,
    lease: Duration,
    since: Instant,
    reported: bool,
}

impl Absence {
    fn new(shard: ShardId, lease: Duration, since: Instant) -> Absence {
        Absence { shard, lease, since, reported: false }
    }

    /// Returns the event to emit while there is no connection, for this cause.
    fn lasts(&mut self, now: Instant, end: LinkEnd) -> Option<Event> {
        let is_short = now.saturating_duration_since(self.since) < self.lease;
        let cause = match end {
            LinkEnd::Misconfigured(cause) => cause,
            LinkEnd::Lost(_) if is_short => return None,
            LinkEnd::Lost(cause) => cause,
        };
        if self.reported {
            return None;
        }
        self.reported = true;
        Some(Event::OwnerLost { shard: self.shard, cause })
    }

    /// Returns the event to emit once there is a connection, if the absence was reported.
    fn ends(&mut self, now: Instant) -> Option<Event> {
        let away = now.saturating_duration_since(self.since);
        std::mem::take(&mut self.reported).then_some(Event::OwnerFound { shard: self.shard, away })
    }
}

/// Connects and says hello, each within a limit of its own. Returns the epoch from which the step
/// owner assigns those of clients, too. `newest` is the newest that this shard has recorded.
async fn connect(
    connector: &Connector,
    owner: &OwnerAddress,
    newest: ClientEpoch,
) -> Result<(PeerConnection, ClientEpoch), LinkEnd> {
    let limit = Connector::LIMIT.min(owner.lease);
    let mut connection =
        PeerConnection::connect(connector, limit).await.map_err(|error| match error {
            error if error.is_misconfigured() => LinkEnd::Misconfigured(Chain(&error).to_string()),
            error => LinkEnd::Lost(format!("cannot connect: {}", Chain(&error))),
        })?;
    let greeted = connection.greet(&owner.peer_hello, owner.shard, newest);
    let epoch = match tokio::time::timeout(limit, greeted).await {
        Ok(greeted) => greeted.map_err(refused)?,
        Err(_) => {
            let cause = format!("{} does not answer within {limit:?}", owner.address);
            return Err(LinkEnd::Lost(cause));
        }
    };
    connector.answered(connection.address());
    Ok((connection, epoch))
}

/// Returns the end of a connection on which the step owner has not welcomed this shard.
fn refused(error: NoWelcome) -> LinkEnd {
    match error {
        NoWelcome::Refused(
            Refusal::Identity { .. }
            | Refusal::Feature { .. }
            | Refusal::Version { .. }
            | Refusal::WrongShard { .. },
        ) => LinkEnd::Misconfigured(error.to_string()),
        // A server that starts or stops refuses, too.
        error => LinkEnd::Lost(error.to_string()),
    }
}

async fn serve(
    core: &Rc<ShardCore>,
    mut connection: PeerConnection,
    lease: Duration,
) -> Result<(), String> {
    let mut beat = tokio::time::interval(lease / 5);
    let mut last_received = Instant::now();
    let mut frames = Vec::new();
    loop {
        tokio::select! {
            frame = connection.next() => {
                let (header, message) = frame.map_err(|error| Chain(&error).to_string())?;
                last_received = Instant::now();
                core.handle(ShardInput::Owner { header: &header, message });
            }
            () = core.unsent().added.notified() => {}
            _ = beat.tick() => {
                if last_received.elapsed() >= lease {
                    return Err("it is silent".to_owned());
                }
                core.unsent().add(&Envelope::default(), &Heartbeat {}.into());
            }
        }
        if core.unsent().take(&mut frames) > UNSENT_MAX {
            return Err("it does not read".to_owned());
        }
        let sent = tokio::time::timeout(lease, connection.send(&frames)).await;
        sent.map_err(|_| "it does not read")?.map_err(|error| error.to_string())?;
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::protocol::refusal::Detail;

    use super::*;

    #[test]
    fn an_absence_is_reported_after_one_lease_and_when_it_ends() {
        let shard = ShardId { task: 1, shard: 2 };
        let lease = Duration::from_secs(5);
        let start = Instant::now();
        let mut absence = Absence::new(shard, lease, start);
        let cause = || "it is silent".to_owned();
        let lost = || LinkEnd::Lost(cause());
        assert_eq!(absence.lasts(start + lease / 2, lost()), None);
        let reported = absence.lasts(start + lease, lost());
        assert_eq!(reported, Some(Event::OwnerLost { shard, cause: cause() }));
        assert_eq!(absence.lasts(start + 2 * lease, lost()), None, "it is reported once");
        let found = absence.ends(start + 3 * lease);
        assert_eq!(found, Some(Event::OwnerFound { shard, away: 3 * lease }));
        // An absence that was not reported ends without an event.
        let mut short = Absence::new(shard, lease, start);
        assert_eq!((short.lasts(start, lost()), short.ends(start + lease)), (None, None));
        // A name that may never have an address is reported at once.
        let mut misspelt = Absence::new(shard, lease, start);
        let cause = "cannot resolve \"p0:1\"".to_owned();
        let reported = misspelt.lasts(start, LinkEnd::Misconfigured(cause.clone()));
        assert_eq!(reported, Some(Event::OwnerLost { shard, cause }));
        assert_eq!(misspelt.lasts(start + lease, lost()), None);
        let busy = Refusal::Busy { what: Detail::clipped("connections"), limit: 1 };
        assert!(matches!(refused(NoWelcome::Refused(busy)), LinkEnd::Lost(_)));
        let other = Refusal::Version { oldest: 1, newest: 1 };
        let LinkEnd::Misconfigured(cause) = refused(NoWelcome::Refused(other)) else { panic!() };
        assert!(cause.starts_with("it refuses this task: "), "{cause}");
        assert!(misspelt.ends(start + 2 * lease).is_some());
    }
}
