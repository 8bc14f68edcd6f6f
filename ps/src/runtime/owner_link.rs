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
use crate::introduction::Introduction;
use crate::shard::Input;

/// How the step owner's shard is reached.
#[derive(Clone, Debug)]
pub(super) struct OwnerWay {
    pub(super) introduction: Introduction,
    pub(super) address: String,
    pub(super) shard: ShardId,
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
    loop {
        if let Ok(line) = connect(&way).await {
            limit = BACK_OFF.0;
            core.unsent().borrow_mut().clear();
            core.handle(Input::OwnerLink { up: true });
            core.handle(Input::Tick);
            // However it ends, the next one begins.
            let _ = serve(&core, line, way.lease).await;
            core.handle(Input::OwnerLink { up: false });
        }
        // Full jitter: many shards that lose one owner do not come back at once.
        let share = RandomState::new().hash_one(0_u8) % 1000;
        tokio::time::sleep(limit * share as u32 / 1000).await;
        limit = (limit * 2).min(BACK_OFF.1);
    }
}

async fn connect(way: &OwnerWay) -> Result<Line, String> {
    let connecting = async {
        let mut line = Line::connect(&way.address).await?;
        line.greet(&way.introduction, way.shard).await?;
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
                core.handle(Input::Owner { header: &header, message });
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
