//! A shard behind a public door, for the simulator of whole clusters: bytes of connections go in and
//! out, the time is told, and what a killed process leaves is kept.
//!
//! The [`Door`] does for its shard what `runtime` does, without a socket, a thread or a clock, and
//! has the shard's invariants checked after everything it does. The fuzz targets have a door of their
//! own (`fuzzing`): they speak to a shard message by message, where this one reads streams of bytes.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{RequestId, ShardId};
use pushpull_common::protocol::message;
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, Poll, encode};

use crate::arena::shelf::Shelf;
use crate::arena::{Budget, Place};
use crate::config::PsConfig;
use crate::metrics::{Counters, Metrics};
use crate::peer_hello::PeerHello;
use crate::shard::durable::{Life, Parts};
use crate::shard::frames::{Came, Frames, Hears};
use crate::shard::output::{Output, PulledParts};
use crate::shard::work::Work;
use crate::shard::{Input, Shard, Way};

/// How often a shard must be told the time.
pub const TICK: Duration = crate::shard::TICK;

/// The memory that a shard may use.
const BYTES_MAX: u64 = 16 << 20;

/// Bytes of a block, so that small variables have several.
const BLOCK_BYTES: usize = 256;

/// Lives are two minutes apart: longer than most last, and hundreds of them are less than a day.
const EPOCHS_A_LIFE: u64 = 1 << 17;

/// A shard's files, as a killed process leaves them.
#[derive(Debug, Default)]
pub struct Files(Shelf);

/// Something a shard wants done.
#[derive(Debug)]
pub enum Event {
    /// Send a frame.
    Send {
        /// Over this connection.
        connection: u64,
        /// Its bytes.
        frame: Vec<u8>,
    },
    /// Send a frame, and descriptors with its first byte.
    Shared {
        /// Over this connection, which is a Unix socket.
        connection: u64,
        /// Its bytes.
        frame: Vec<u8>,
        /// Of the memory that is lent.
        descriptors: Vec<OwnedFd>,
    },
    /// Send the values that answer a pull.
    Values {
        /// Over this connection.
        connection: u64,
        /// Frame by frame, as the connection takes them.
        values: Box<Values>,
    },
    /// Close a connection once all that was sent before is out.
    Close {
        /// Which.
        connection: u64,
    },
    /// Send a frame over the connection to the step owner's shard.
    ToOwner {
        /// Its bytes.
        frame: Vec<u8>,
    },
    /// A step has been applied, and is committed.
    Applied {
        /// Counted from 0.
        step: u64,
        /// It was made of the pushes of these tokens, in this order.
        tokens: Vec<u64>,
    },
}

/// The answer to a pull. What it is of stays pinned until it is dropped.
#[derive(Debug)]
pub struct Values {
    parts: PulledParts,
    part_bytes: u64,
}

/// What a slice of work came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worked {
    /// There is nothing more to do.
    Idle,
    /// There is more to do.
    More,
    /// There is more to do once values that are being sent are out.
    Blocked,
}

/// One shard of a ps task, with its connections.
#[derive(Debug)]
pub struct Door {
    shard: Shard,
    id: ShardId,
    config: Arc<PsConfig>,
    shelf: Shelf,
    connections: BTreeMap<u64, Stream>,
    /// The connection to the step owner's shard, and whether that has said welcome.
    owner: Option<(Stream, bool)>,
    requests: u64,
    part_bytes: u64,
    counters: Arc<Counters>,
    /// Whether clients of this host have come over Unix sockets.
    shares: bool,
    events: VecDeque<Event>,
}

/// What is read from a connection.
#[derive(Debug, Default)]
struct Stream {
    /// Up to the hello.
    reader: FrameReader,
    /// From there on.
    frames: Option<Frames>,
    closing: bool,
}

/// The shard as its connections find it, at a time.
struct Hearing<'a> {
    door: &'a mut Door,
    now: Instant,
}

impl Hears for Hearing<'_> {
    fn hear(&mut self, input: Input<'_>) {
        self.door.handle(self.now, input);
    }

    fn with_body<R>(&mut self, connection: u64, receive: impl FnOnce(Option<&mut [u8]>) -> R) -> R {
        receive(self.door.shard.body_target(connection))
    }
}

impl Values {
    /// The bytes of the next frame; `None` after the last.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        let mut frame = Vec::new();
        let range = self.parts.next_part_of(self.part_bytes, &mut frame)?;
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        self.parts.slices(range, &mut slices);
        slices.iter().for_each(|slice| frame.extend_from_slice(slice));
        Some(frame)
    }
}

impl Door {
    /// A process opens a shard on these files. `life` is higher in each process than in those before.
    /// Values are sent in parts of at most `part_bytes`. Clients of the same host, whose incarnations are
    /// even, are lent memory if `shares` says so.
    ///
    /// # Panics
    /// If the settings are not sound, or the files cannot be opened.
    pub fn open(
        config: PsConfig,
        shard: u16,
        files: Files,
        life: u64,
        now: Instant,
        part_bytes: u64,
        shares: bool,
    ) -> Door {
        let config = PsConfig { block_bytes: BLOCK_BYTES, ..config };
        config.check().expect("the settings are sound");
        let (config, counters) = (Arc::new(config), Arc::<Counters>::default());
        let id = ShardId { task: config.task.index, shard };
        let parts = Parts {
            id,
            config: config.clone(),
            identity: Arc::new(config.identity()),
            budget: Budget::new(BYTES_MAX),
            counters: counters.clone(),
        };
        let life = Life { boot: [1; 16], arena: life, epoch_base: life * EPOCHS_A_LIFE };
        let opened = Shard::open(parts, Place::Shelf(files.0.clone()), life, now);
        let shard = opened.expect("a shard goes on with what it left");
        let mut door = Door {
            shard,
            id,
            config,
            shelf: files.0,
            connections: BTreeMap::new(),
            owner: None,
            requests: 0,
            part_bytes,
            counters,
            shares,
            events: VecDeque::new(),
        };
        door.settle();
        door
    }

    /// Kills the process: what it leaves.
    pub fn kill(self) -> Files {
        Files(Shelf::with(self.shelf.contents()))
    }

    /// Which shard it is.
    pub fn id(&self) -> ShardId {
        self.id
    }

    /// Whether this shard owns the step.
    pub fn owns_step(&self) -> bool {
        self.config.owns_step() && self.id.shard == 0
    }

    /// Steps applied; in asynchronous mode the step owner's.
    pub fn steps(&self) -> u64 {
        self.shard.step().0
    }

    /// What the shard has counted.
    pub fn metrics(&self) -> Metrics {
        Metrics::sum([&*self.counters])
    }

    /// For whom it waits, in words.
    pub fn waits(&self, now: Instant) -> String {
        let (steps, due) = self.shard.steps_and_due();
        let held = self.shard.whole_tokens();
        let awaited = self.shard.awaited_step(now).unwrap_or_default();
        format!("{}: {steps} steps applied, due {due:?}, held {held:?}; {awaited}", self.id)
    }

    /// Bytes come over a connection; the first ones are new to it. False if they break the protocol:
    /// the connection is to be cut.
    pub fn receive(&mut self, now: Instant, connection: u64, bytes: &[u8]) -> bool {
        // What stays in its place hears whether the connection is closed meanwhile.
        let place = self.connections.entry(connection).or_default();
        let closing = place.closing;
        let mut stream = Stream { closing, ..std::mem::take(place) };
        let sound = self.read(now, connection, &mut stream, bytes);
        stream.closing |= self.is_closing(connection);
        self.connections.insert(connection, stream);
        sound
    }

    fn read(&mut self, now: Instant, connection: u64, stream: &mut Stream, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        let mut source = source(&mut rest);
        loop {
            // Nothing is read from a connection that is being closed.
            stream.closing |= self.is_closing(connection);
            if stream.closing {
                return true;
            }
            if let Some(frames) = &mut stream.frames {
                match frames.next(&mut source, &mut Hearing { door: self, now }) {
                    Err(_) => return false,
                    Ok(Came::Blocked | Came::Closed) => return true,
                    Ok(Came::Whole) => continue,
                }
            }
            match stream.reader.poll(&mut source) {
                Err(_) => return false,
                Ok(Poll::Pending | Poll::Closed) => return true,
                Ok(Poll::Frame(header, Message::Hello(hello))) => {
                    let reader = std::mem::take(&mut stream.reader);
                    stream.frames = Some(Frames::new(connection, reader));
                    let (hello, header) = (&hello, &header);
                    let way = match (hello.incarnation.0 % 2 == 1, self.shares) {
                        (true, _) => Way::Remote,
                        (false, true) => Way::Unix { same_user: true },
                        (false, false) => Way::Loopback,
                    };
                    self.handle(now, Input::Connected { connection, hello, header, way });
                }
                Ok(Poll::Frame(..)) => return false,
            }
        }
    }

    fn is_closing(&self, connection: u64) -> bool {
        self.connections.get(&connection).is_some_and(|stream| stream.closing)
    }

    /// A connection is gone.
    pub fn disconnect(&mut self, now: Instant, connection: u64) {
        if self.connections.remove(&connection).is_some_and(|stream| stream.frames.is_some()) {
            self.handle(now, Input::Disconnected { connection });
        }
    }

    /// Time has passed; due at least every [`TICK`].
    pub fn tick(&mut self, now: Instant) {
        self.handle(now, Input::Tick);
        let stall_timeout = self.config.stall_timeout;
        for connection in self.shard.take_back_from_stalled_readers(now, stall_timeout) {
            if let Some(stream) = self.connections.get_mut(&connection) {
                stream.closing = true;
            }
            self.events.push_back(Event::Close { connection });
        }
    }

    /// There is a connection to the step owner's shard: says hello.
    pub fn owner_connected(&mut self) {
        self.owner = Some((Stream::default(), false));
        let owner = self.config.cluster.step_owner().expect("a cluster has a ps task");
        let (task, identity) = (self.config.task.clone(), self.config.identity());
        let owner = ShardId { task: owner.index, shard: 0 };
        let hello = PeerHello { task, identity }.hello(owner);
        self.requests += 1;
        let request = RequestId(self.requests);
        self.tell_owner(&Envelope { request, ..Envelope::default() }, &hello.into());
    }

    /// Bytes come from the step owner's shard. False if the connection is of no use.
    pub fn on_owner_message(&mut self, now: Instant, bytes: &[u8]) -> bool {
        let Some((mut stream, mut welcome)) = self.owner.take() else { return false };
        let mut rest = bytes;
        let mut source = source(&mut rest);
        let sound = loop {
            match stream.reader.poll(&mut source) {
                Err(_) => break false,
                Ok(Poll::Pending | Poll::Closed) => break true,
                Ok(Poll::Frame(_, Message::Welcome(_))) if !welcome => {
                    welcome = true;
                    stream.reader.open();
                    self.handle(now, Input::OwnerLink { up: true });
                    self.handle(now, Input::Tick);
                }
                Ok(Poll::Frame(..)) if !welcome => break false,
                Ok(Poll::Frame(header, message)) => {
                    self.handle(now, Input::Owner { header: &header, message });
                }
            }
        };
        self.owner = Some((stream, welcome));
        sound
    }

    /// The connection to the step owner's shard is gone.
    pub fn owner_lost(&mut self, now: Instant) {
        if self.owner.take().is_some_and(|(_, welcome)| welcome) {
            self.handle(now, Input::OwnerLink { up: false });
        }
    }

    /// Tells the step owner's shard that this one lives.
    pub fn beat(&mut self) {
        if self.owner.as_ref().is_some_and(|(_, welcome)| *welcome) {
            self.tell_owner(&Envelope::default(), &message::Heartbeat {}.into());
        }
    }

    fn tell_owner(&mut self, envelope: &Envelope, message: &Message) {
        let frame = frame_of(envelope, message, &[]);
        self.events.push_back(Event::ToOwner { frame });
    }

    /// Whether [`Door::work`] has something to do.
    pub fn has_work(&self) -> bool {
        self.shard.has_work()
    }

    /// Does a slice of the work that is due.
    pub fn work(&mut self, now: Instant) -> Worked {
        let (step, due) = self.shard.steps_and_due();
        let due = due.map(<[u64]>::to_vec);
        let work = self.shard.work(now);
        self.shard.check_invariants();
        let applied = self.shard.steps_and_due().0;
        if applied != step {
            assert_eq!(applied, step + 1, "one step at a time");
            let tokens = due.expect("a step that is applied was due");
            self.events.push_back(Event::Applied { step, tokens });
        }
        self.settle();
        match work {
            Work::Idle => Worked::Idle,
            Work::More => Worked::More,
            Work::Blocked | Work::Flushing | Work::Growing => Worked::Blocked,
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn handle(&mut self, now: Instant, input: Input<'_>) {
        self.shard.handle(now, input);
        self.shard.check_invariants();
        self.settle();
    }

    /// Takes what the shard wants done.
    fn settle(&mut self) {
        while let Some(output) = self.shard.poll_output() {
            let event = match output {
                Output::Send { connection, envelope, message, body, .. } => {
                    Event::Send { connection, frame: frame_of(&envelope, &message, &body) }
                }
                Output::Stream { connection, parts } => {
                    let part_bytes = self.part_bytes;
                    Event::Values { connection, values: Box::new(Values { parts, part_bytes }) }
                }
                Output::Close { connection } => {
                    if let Some(stream) = self.connections.get_mut(&connection) {
                        stream.closing = true;
                    }
                    Event::Close { connection }
                }
                Output::ToOwner { envelope, message } => {
                    Event::ToOwner { frame: frame_of(&envelope, &message, &[]) }
                }
                Output::Members { .. } | Output::Event(_) => continue,
                Output::Shared { connection, envelope, message, descriptors } => {
                    let frame = frame_of(&envelope, &message, &[]);
                    Event::Shared { connection, frame, descriptors }
                }
                Output::Order(_)
                | Output::SaveShard(_)
                | Output::Flush(_)
                | Output::RestoreShard(_) => unreachable!("no place for checkpoints is configured"),
            };
            self.events.push_back(event);
        }
    }
}

fn frame_of(envelope: &Envelope, message: &Message, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(&mut frame, envelope, message, BodyStamp::plain(body.len() as u64));
    frame.extend_from_slice(body);
    frame
}

/// Reads from these bytes, and shortens them by what was read.
fn source<'a, 'b>(
    rest: &'a mut &'b [u8],
) -> impl FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize> + use<'a, 'b> {
    move |slices| {
        if rest.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for slice in slices {
            let taken = slice.len().min(rest.len());
            let (head, tail) = rest.split_at(taken);
            slice[..taken].copy_from_slice(head);
            *rest = tail;
            count += taken;
        }
        Ok(count)
    }
}
