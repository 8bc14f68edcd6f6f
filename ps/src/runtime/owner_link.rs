//! A shard's connection to the step owner's shard, for as long as the shard serves: what it holds
//! goes there, and what is decided comes back.

use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::message::Heartbeat;
use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};
use tokio::time::Instant;

use super::peer::Line;
use super::shard_thread::Core;
use crate::event::Event;
use crate::peer_hello::PeerHello;
use crate::shard::ShardInput;

/// How the step owner's shard is reached.
#[derive(Clone, Debug)]
pub(super) struct OwnerWay {
    pub(super) peer_hello: PeerHello,
    pub(super) address: String,
    pub(super) shard: ShardId,
    /// The shard that goes there.
    pub(super) own: ShardId,
    /// Silence for so long is the end of a connection.
    pub(super) lease: Duration,
}

/// What waits to be sent: a few words for each push that lies here, said again from time to time.
/// A step owner that does not read for so long is as good as gone.
const UNSENT_MAX: usize = 8192;

/// Frames that wait to be sent to the step owner, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    frames: Vec<u8>,
    count: usize,
}

impl Unsent {
    pub(super) fn add(&mut self, envelope: &Envelope, message: &Message) {
        encode(&mut self.frames, envelope, message, BodyStamp::plain(0));
        self.count += 1;
    }

    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.count = 0;
    }

    /// Takes them out, in place of what was in `frames`; how many there were.
    fn take(&mut self, frames: &mut Vec<u8>) -> usize {
        frames.clear();
        std::mem::swap(frames, &mut self.frames);
        std::mem::take(&mut self.count)
    }
}

/// How long to wait before the next attempt: the first time, and at most.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Keeps the connection, and makes it anew when it is lost.
pub(super) async fn keep(core: Rc<Core>, way: OwnerWay) {
    let mut limit = BACK_OFF.0;
    let mut absence = Absence::new(way.own, way.lease, Instant::now());
    loop {
        let ended = match connect(&way).await {
            Err(cause) => Err(cause),
            Ok(line) => {
                limit = BACK_OFF.0;
                core.tell(absence.ends(Instant::now()));
                core.unsent().borrow_mut().clear();
                core.handle(ShardInput::OwnerLink { up: true });
                core.handle(ShardInput::Tick);
                // However it ends, the next one begins.
                let ended = serve(&core, line, way.lease).await;
                absence = Absence::new(way.own, way.lease, Instant::now());
                core.handle(ShardInput::OwnerLink { up: false });
                ended
            }
        };
        if let Err(cause) = ended {
            core.tell(absence.lasts(Instant::now(), cause));
        }
        // Full jitter: many shards that lose one owner do not come back at once.
        let share = RandomState::new().hash_one(0_u8) % 1000;
        tokio::time::sleep(limit * share as u32 / 1000).await;
        limit = (limit * 2).min(BACK_OFF.1);
    }
}

/// A time without a connection. It is told once it has lasted for a lease: a step owner that is started anew is
/// back before, and one that ends with the training is not missed.
#[derive(Debug)]
struct Absence {
    shard: ShardId,
    lease: Duration,
    since: Instant,
    told: bool,
}

impl Absence {
    fn new(shard: ShardId, lease: Duration, since: Instant) -> Absence {
        Absence { shard, lease, since, told: false }
    }

    /// There is still no connection, for this cause.
    fn lasts(&mut self, now: Instant, cause: String) -> Option<Event> {
        if self.told || now.saturating_duration_since(self.since) < self.lease {
            return None;
        }
        self.told = true;
        Some(Event::OwnerLost { shard: self.shard, cause })
    }

    /// There is a connection.
    fn ends(&mut self, now: Instant) -> Option<Event> {
        let away = now.saturating_duration_since(self.since);
        std::mem::take(&mut self.told).then_some(Event::OwnerFound { shard: self.shard, away })
    }
}

async fn connect(way: &OwnerWay) -> Result<Line, String> {
    let connecting = async {
        let mut line = Line::connect(&way.address).await?;
        line.greet(&way.peer_hello, way.shard).await?;
        Ok(line)
    };
    let connected = tokio::time::timeout(way.lease, connecting).await;
    connected.unwrap_or_else(|_| Err(format!("{} does not answer", way.address)))
}

async fn serve(core: &Rc<Core>, mut line: Line, lease: Duration) -> Result<(), String> {
    let mut beat = tokio::time::interval(lease / 5);
    let (mut heard, mut frames) = (Instant::now(), Vec::new());
    loop {
        tokio::select! {
            frame = line.next() => {
                let (header, message) = frame.map_err(|error| error.to_string())?;
                heard = Instant::now();
                core.handle(ShardInput::Owner { header: &header, message });
            }
            () = core.to_owner().notified() => {}
            _ = beat.tick() => {
                if heard.elapsed() >= lease {
                    return Err("it is silent".to_owned());
                }
                core.unsent().borrow_mut().add(&Envelope::default(), &Heartbeat {}.into());
            }
        }
        if core.unsent().borrow_mut().take(&mut frames) > UNSENT_MAX {
            return Err("it does not read".to_owned());
        }
        let sent = tokio::time::timeout(lease, line.send(&frames)).await;
        sent.map_err(|_| "it does not read")?.map_err(|error| error.to_string())?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absence_is_told_once_it_has_lasted_for_a_lease_and_when_it_ends() {
        let (shard, lease) = (ShardId { task: 1, shard: 2 }, Duration::from_secs(5));
        let start = Instant::now();
        let mut absence = Absence::new(shard, lease, start);
        let cause = || "it is silent".to_owned();
        assert_eq!(absence.lasts(start + lease / 2, cause()), None);
        let told = absence.lasts(start + lease, cause());
        assert_eq!(told, Some(Event::OwnerLost { shard, cause: cause() }));
        assert_eq!(absence.lasts(start + 2 * lease, cause()), None, "it is told once");
        let found = absence.ends(start + 3 * lease);
        assert_eq!(found, Some(Event::OwnerFound { shard, away: 3 * lease }));
        // One that nobody was told of ends in silence.
        let mut short = Absence::new(shard, lease, start);
        assert_eq!((short.lasts(start, cause()), short.ends(start + lease)), (None, None));
    }
}
