//! A shard's thread: the shard, its connections, its clock and its long work, on one runtime.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{BodyStamp, FrameReader, Header, encode};
use pushpull_net::{AdaptiveSpin, DetachedStream, Processors, SpinLimits, SpinWait};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::connection;
use super::outbox::{Answered, Outbox, Outgoing};
use super::owner_link::{self, OwnerWay, Unsent};
use crate::checkpoint::CheckpointStorage;
use crate::event::EventSink;
use crate::shard::checkpoints::{SaverEvent, SaverOrder};
use crate::shard::frames::FrameSink;
use crate::shard::output::ShardOutput;
use crate::shard::power::Flush;
use crate::shard::work::Work;
use crate::shard::{PeerOrigin, Shard, ShardInput, TICK};

/// How long a stopping shard goes on to finish pushes that are whole and to send answers.
const DRAIN: Duration = Duration::from_secs(2);

/// How often it is looked whether those who read memory that they were lent let work go on: about as long
/// as reading the values of a small model takes.
const LOOK: Duration = Duration::from_millis(1);

/// A peer that has said hello, on its way to its shard.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) stream: DetachedStream,
    pub(super) reader: FrameReader,
    pub(super) header: Header,
    pub(super) hello: Hello,
    pub(super) origin: PeerOrigin,
}

/// How many members have joined a shard, and how many are present.
pub(super) type Members = (usize, usize);

/// The shard and its connections, shared by the tasks of its thread.
#[derive(Debug)]
pub(super) struct Core {
    shard: RefCell<Shard>,
    outboxes: RefCell<HashMap<u64, Rc<Outbox>>>,
    next_connection: Cell<u64>,
    work: Notify,
    /// Of those that have something to send which can wait until no work is left, or until the next tick.
    corked: RefCell<Vec<Rc<Outbox>>>,
    /// Since when an update waits for memory that pulls hold.
    blocked_since: Cell<Option<Instant>>,
    idle: Notify,
    members: watch::Sender<Members>,
    stall_timeout: Duration,
    storage: Option<Arc<dyn CheckpointStorage>>,
    events: EventSink,
    orders: Option<mpsc::Sender<SaverOrder>>,
    /// Frames for the step owner, in synchronous mode.
    unsent: RefCell<Unsent>,
    to_owner: Notify,
    chores: RefCell<VecDeque<ShardOutput>>,
    chore: Notify,
    flush: RefCell<Option<Box<Flush>>>,
    flush_due: Notify,
    flushed: Notify,
    /// Orders that the saver had no room for yet.
    orders_left: RefCell<VecDeque<SaverOrder>>,
    spin: RefCell<PeerSpin>,
    processors: Processors,
    /// A wait for a peer has begun that may be polled.
    polls: Notify,
}

/// How a shard's thread reaches the checkpoints, the step owner and whoever runs the server.
#[derive(Debug, Default)]
pub(super) struct Ways {
    pub(super) storage: Option<Arc<dyn CheckpointStorage>>,
    /// On the shard that owns the step.
    pub(super) saver: Option<(mpsc::Sender<SaverOrder>, mpsc::Receiver<SaverEvent>)>,
    /// In synchronous mode, on the others.
    pub(super) owner: Option<OwnerWay>,
    pub(super) events: EventSink,
}

impl Core {
    /// Gives a new connection its number.
    pub(super) fn register(&self) -> (u64, Rc<Outbox>) {
        let connection = self.next_connection.get();
        self.next_connection.set(connection + 1);
        let outbox = Rc::new(Outbox::new());
        self.outboxes.borrow_mut().insert(connection, outbox.clone());
        (connection, outbox)
    }

    /// Forgets a connection; what it had pinned is free.
    pub(super) fn forget(&self, connection: u64) {
        if let Some(outbox) = self.outboxes.borrow_mut().remove(&connection) {
            self.corked.borrow_mut().retain(|other| !Rc::ptr_eq(other, &outbox));
        }
        self.handle(ShardInput::Disconnected { connection });
        self.work.notify_one();
        self.idle.notify_one();
    }

    /// Tells the shard what happened, and does what it wants done.
    pub(super) fn handle(&self, input: ShardInput<'_>) {
        let now = Instant::now();
        self.spin.borrow_mut().interrupted(now);
        let mut shard = self.shard.borrow_mut();
        shard.handle(now, input);
        // A small push is applied here and now; only the rest of a long one waits its turn.
        let mut work = Work::Idle;
        if shard.has_work() {
            work = self.note(now, shard.work(now));
            match work {
                Work::More => self.work.notify_one(),
                // Nobody tells when it may go on.
                Work::Blocked if shard.is_shared() => self.work.notify_one(),
                _ => {}
            }
        }
        self.deliver(&mut shard, work);
    }

    /// The answer to a pull has been sent: an update that waited for memory may go on.
    pub(super) fn answered(&self, answer: Answered) {
        match answer {
            Answered::Rows(rows) => self.shard.borrow_mut().rows_sent(rows),
            Answered::Values(parts) => {
                self.shard.borrow_mut().pull_sent(*parts);
                self.released();
            }
        }
    }

    /// Memory may be free again: an update that waited for it may go on.
    fn released(&self) {
        if self.shard.borrow().has_work() {
            self.work.notify_one();
        }
    }

    /// Tells whoever runs the server.
    pub(super) fn tell(&self, event: Option<crate::event::Event>) {
        event.iter().for_each(|event| self.events.emit(event));
    }

    pub(super) fn fault(&self) {
        self.shard.borrow().count_fault();
    }

    /// Does what a shard wants done; what can wait does while there is work.
    fn deliver(&self, shard: &mut Shard, work: Work) {
        while let Some(output) = shard.poll_output() {
            match output {
                ShardOutput::Send { connection, envelope, message, body, crc, can_wait } => {
                    let Some(outbox) = self.outbox(connection) else {
                        continue;
                    };
                    let mut head = Vec::new();
                    let stamp = BodyStamp { bytes: body.len() as u64, crc };
                    encode(&mut head, &envelope, &message, stamp);
                    let frame = Outgoing::Frame { head, body };
                    if can_wait && work == Work::More && !outbox.is_full() {
                        outbox.put(frame);
                        self.corked.borrow_mut().push(outbox);
                    } else {
                        outbox.push(frame);
                    }
                }
                ShardOutput::Shared { connection, envelope, message, descriptors } => {
                    let Some(outbox) = self.outbox(connection) else {
                        continue;
                    };
                    let mut head = Vec::new();
                    encode(&mut head, &envelope, &message, BodyStamp::NONE);
                    outbox.push(Outgoing::Shared { head, descriptors });
                }
                ShardOutput::Stream { connection, parts } => {
                    if let Some(outbox) = self.outbox(connection) {
                        outbox.push(Outgoing::Parts(parts));
                    }
                }
                ShardOutput::Close { connection } => {
                    if let Some(outbox) = self.outbox(connection) {
                        outbox.close();
                    }
                }
                ShardOutput::SaverOrder(order) => self.order(order),
                output @ (ShardOutput::SaveShard(_) | ShardOutput::RestoreShard(_)) => {
                    self.chores.borrow_mut().push_back(output);
                    self.chore.notify_one();
                }
                ShardOutput::Flush(flush) => {
                    *self.flush.borrow_mut() = Some(flush);
                    self.flush_due.notify_one();
                }
                ShardOutput::ToOwner { envelope, message } => {
                    self.unsent.borrow_mut().add(&envelope, &message);
                    self.to_owner.notify_one();
                }
                ShardOutput::Event(event) => self.events.emit(&event),
                // Nobody may be listening any more, while the server stops.
                ShardOutput::Members { joined, present } => {
                    self.members.send_replace((joined, present));
                }
            }
        }
        if work != Work::More {
            self.send_corked();
        }
    }

    fn send_corked(&self) {
        self.corked.borrow_mut().drain(..).for_each(|outbox| outbox.send_all());
    }

    /// The frames that wait for the connection to the step owner.
    pub(super) fn unsent(&self) -> &RefCell<Unsent> {
        &self.unsent
    }

    /// Tells that there are some.
    pub(super) fn to_owner(&self) -> &Notify {
        &self.to_owner
    }

    /// Tells the saver what to do, now or when it has room for more.
    fn order(&self, order: SaverOrder) {
        self.orders_left.borrow_mut().push_back(order);
        self.give_orders();
    }

    fn give_orders(&self) {
        let mut left = self.orders_left.borrow_mut();
        while let (Some(orders), Some(order)) = (&self.orders, left.pop_front()) {
            if let Err(TrySendError::Full(order)) = orders.try_send(order) {
                left.push_front(order);
                return;
            }
        }
        left.clear();
    }

    /// Has files written and read, one at a time, by threads that may wait for a disk.
    async fn keep_doing_chores(&self) {
        loop {
            let chore = self.chores.borrow_mut().pop_front();
            let storage = self.storage.clone();
            match (chore, storage) {
                (Some(ShardOutput::SaveShard(save)), Some(storage)) => {
                    let (connection, request) = (save.connection, save.request);
                    let saved = tokio::task::spawn_blocking(move || save.run(storage)).await;
                    let result = saved.unwrap_or_else(|panic| Err(panic.to_string()));
                    self.handle(ShardInput::ShardSaved { connection, request, result });
                    // What it had pinned is free.
                    self.released();
                }
                (Some(ShardOutput::RestoreShard(restore)), Some(storage)) => {
                    let restored = tokio::task::spawn_blocking(move || restore.run(storage)).await;
                    match restored {
                        Ok(restored) => self.handle(ShardInput::ShardRestored(Box::new(restored))),
                        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                    }
                }
                _ => self.chore.notified().await,
            }
        }
    }

    /// Has images put on the disk, for as long as the thread lives.
    async fn keep_flushing(&self) {
        loop {
            while self.flush_once().await {}
            self.flush_due.notified().await;
        }
    }

    /// Has the image that is due put on the disk, if one is.
    async fn flush_once(&self) -> bool {
        let Some(flush) = self.flush.borrow_mut().take() else { return false };
        let flushed = tokio::task::spawn_blocking(move || flush.run()).await;
        let result = flushed.unwrap_or_else(|panic| Err(panic.to_string()));
        self.handle(ShardInput::Flushed(result));
        // Blocks that older images named are free.
        self.released();
        self.flushed.notify_one();
        true
    }

    /// Tells the shard what the saver says.
    async fn keep_hearing(&self, mut news: mpsc::Receiver<SaverEvent>) {
        while let Some(news) = news.recv().await {
            self.handle(ShardInput::SaverEvent(news));
        }
        std::future::pending().await
    }

    /// A connection waits for its peer: for the rest of a frame or of a write, or for the next request.
    pub(super) fn wait_for_peers(&self, rest: bool) {
        self.spin.borrow_mut().begin(Instant::now(), rest);
        self.polls.notify_one();
    }

    /// What a connection waited for is there.
    pub(super) fn peer_goes_on(&self) {
        self.spin.borrow_mut().waited(Instant::now());
    }

    /// Polls while peers are expected soon.
    async fn keep_polling(&self) {
        loop {
            self.polls.notified().await;
            while self.spin.borrow_mut().polls(Instant::now(), &self.processors) {
                // The runtime checks all sockets, and the time, before it comes back here.
                tokio::task::yield_now().await;
            }
        }
    }

    fn outbox(&self, connection: u64) -> Option<Rc<Outbox>> {
        self.outboxes.borrow().get(&connection).cloned()
    }

    /// Does the long work, a slice at a time, for as long as the thread lives.
    async fn keep_working(&self) {
        loop {
            self.work.notified().await;
            loop {
                match self.work_slice() {
                    // The other tasks of this thread have their turn between two slices.
                    Work::More => tokio::task::yield_now().await,
                    Work::Blocked if self.shard.borrow().is_shared() => {
                        tokio::time::sleep(LOOK).await;
                    }
                    _ => break,
                }
            }
        }
    }

    fn work_slice(&self) -> Work {
        let now = Instant::now();
        self.spin.borrow_mut().interrupted(now);
        let mut shard = self.shard.borrow_mut();
        let work = self.note(now, shard.work(now));
        self.deliver(&mut shard, work);
        work
    }

    /// Remembers since when updates are held up.
    fn note(&self, now: Instant, work: Work) -> Work {
        let since = self.blocked_since.get().filter(|_| work == Work::Blocked);
        self.blocked_since.set(since.or((work == Work::Blocked).then_some(now)));
        work
    }

    /// Cuts off the pull that is longest under way, once updates have waited long enough for the
    /// memory it holds: one slow reader holds nobody up for longer.
    fn cut_slowest_pull(&self, now: Instant) {
        let Some(since) = self.blocked_since.get() else { return };
        if now.saturating_duration_since(since) < self.stall_timeout {
            return;
        }
        // Who reads in memory that is lent has held it since before: nothing was changed meanwhile.
        let readers = self.shard.borrow_mut().revoke_slow_readers();
        self.cut(&readers);
        if !readers.is_empty() {
            self.blocked_since.set(Some(now));
            return self.work.notify_one();
        }
        let outboxes = self.outboxes.borrow();
        let slow = outboxes.values().filter(|outbox| outbox.pull_since.get().is_some());
        if let Some(slowest) = slow.min_by_key(|outbox| outbox.pull_since.get()) {
            self.fault();
            slowest.break_off();
            self.blocked_since.set(Some(now));
        }
    }

    fn cut(&self, connections: &[u64]) {
        for outbox in connections.iter().filter_map(|&connection| self.outbox(connection)) {
            self.fault();
            outbox.break_off();
        }
    }

    /// Tells the shard the time, and breaks off connections that have stalled.
    async fn keep_ticking(&self) {
        let mut interval = tokio::time::interval(TICK);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.handle(ShardInput::Tick);
            // There may always be work.
            self.send_corked();
            self.give_orders();
            let now = Instant::now();
            self.cut_slowest_pull(now);
            let stalled = self.shard.borrow_mut().revoke_stalled_readers(now, self.stall_timeout);
            self.cut(&stalled);
            for outbox in self.outboxes.borrow().values() {
                let stalled = [outbox.stuck_since.get(), outbox.half_since.get()]
                    .into_iter()
                    .flatten()
                    .any(|since| now.saturating_duration_since(since) >= self.stall_timeout);
                if stalled && !outbox.broken.get() {
                    self.fault();
                    outbox.break_off();
                }
            }
        }
    }

    /// Finishes the pushes that are whole, sends what is to be sent, and closes every connection.
    async fn drain(&self) {
        let finish = async {
            // An update may wait for a flush, and its answer for another.
            loop {
                let work = self.work_slice();
                // Nothing waits for the end of what may take too long.
                self.send_corked();
                match work {
                    Work::More => tokio::task::yield_now().await,
                    Work::Blocked if self.shard.borrow().is_shared() => {
                        tokio::time::sleep(LOOK).await;
                    }
                    _ if self.shard.borrow().waits_for_image() => self.flushed.notified().await,
                    _ => break,
                }
            }
            for outbox in self.outboxes.borrow().values() {
                outbox.close();
            }
            while !self.outboxes.borrow().is_empty() {
                self.idle.notified().await;
            }
        };
        // Whoever does not take its answers in time is cut off.
        let _ = tokio::time::timeout(DRAIN, finish).await;
    }

    /// Waits for the flush under way, as the end of the runtime would: if it fails, the files must
    /// say so to the next process.
    async fn await_flush(&self) {
        self.outboxes.borrow().values().for_each(|outbox| outbox.break_off());
        while self.shard.borrow().is_flushing() {
            self.flushed.notified().await;
        }
    }
}

impl FrameSink for &Core {
    fn frame_input(&mut self, input: ShardInput<'_>) {
        self.handle(input);
    }

    fn with_body<R>(&mut self, connection: u64, receive: impl FnOnce(Option<&mut [u8]>) -> R) -> R {
        receive(self.shard.borrow_mut().body_target(connection))
    }
}

/// Runs a shard until `stop`, on the thread it is called on.
pub(super) fn run(
    shard: Shard,
    mut arrivals: mpsc::Receiver<Arrived>,
    members: watch::Sender<Members>,
    (stall_timeout, busy_poll): (Duration, Duration),
    ways: Ways,
    stop: &CancellationToken,
) -> std::io::Result<()> {
    let (orders, news) = ways.saver.unzip();
    // Nobody ever says anything where there is no saver.
    let news = news.unwrap_or_else(|| mpsc::channel(1).1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let core = Rc::new(Core {
        shard: RefCell::new(shard),
        outboxes: RefCell::default(),
        next_connection: Cell::new(1),
        work: Notify::new(),
        corked: RefCell::default(),
        blocked_since: Cell::new(None),
        idle: Notify::new(),
        members,
        stall_timeout,
        storage: ways.storage,
        events: ways.events,
        orders,
        unsent: RefCell::default(),
        to_owner: Notify::new(),
        chores: RefCell::default(),
        chore: Notify::new(),
        flush: RefCell::default(),
        flush_due: Notify::new(),
        flushed: Notify::new(),
        orders_left: RefCell::default(),
        spin: RefCell::new(PeerSpin::new(busy_poll)),
        processors: Processors::current(),
        polls: Notify::new(),
    });
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let flushing = core.clone();
        // It outlives the others: answers wait for it while the server stops.
        tokio::task::spawn_local(async move { flushing.keep_flushing().await });
        let serve = async {
            while let Some(arrived) = arrivals.recv().await {
                tokio::task::spawn_local(connection::serve(core.clone(), arrived));
            }
        };
        let keep_owner_link = async {
            match ways.owner {
                Some(way) => owner_link::keep(core.clone(), way).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = keep_owner_link => {}
            () = core.keep_working() => {}
            () = core.keep_ticking() => {}
            () = core.keep_polling() => {}
            () = core.keep_doing_chores() => {}
            () = core.keep_hearing(news) => {}
            () = serve => {}
        }
        drop(arrivals);
        // What is read and written ends after the piece in hand; this thread waits for it.
        core.shard.borrow().abandon_files();
        core.drain().await;
        core.await_flush().await;
    });
    Ok(())
}

/// The waits of a shard's thread for its peers. Rests have a history of their own: a peer that computes before a
/// large request sends all of the request at once.
#[derive(Debug)]
struct PeerSpin {
    requests: AdaptiveSpin,
    rests: AdaptiveSpin,
    /// The current wait, and whether it is for a rest.
    wait: Option<(SpinWait, bool)>,
    /// Whether other threads wanted the processor, and when that was asked.
    oversubscribed: Option<(bool, Instant)>,
}

impl PeerSpin {
    fn new(longest: Duration) -> PeerSpin {
        let limits = SpinLimits { unconditional: Duration::ZERO, longest, recheck: longest };
        let (requests, rests) = (AdaptiveSpin::new(limits), AdaptiveSpin::new(limits));
        PeerSpin { requests, rests, wait: None, oversubscribed: None }
    }

    fn of(&mut self, rest: bool) -> &mut AdaptiveSpin {
        if rest { &mut self.rests } else { &mut self.requests }
    }

    fn begin(&mut self, now: Instant, rest: bool) {
        self.wait = Some((self.of(rest).begin(now), rest));
    }

    fn polls(&mut self, now: Instant, processors: &Processors) -> bool {
        let Some((mut wait, rest)) = self.wait else { return false };
        let polls =
            wait.polls(now, || self.of(rest).pays() && !self.is_oversubscribed(now, processors));
        self.wait = Some((wait, rest));
        polls
    }

    /// Asks once in [`ASKED_AGAIN`]: an answer takes 2 us.
    fn is_oversubscribed(&mut self, now: Instant, processors: &Processors) -> bool {
        match self.oversubscribed {
            Some((answer, asked)) if now.saturating_duration_since(asked) < ASKED_AGAIN => answer,
            _ => self.oversubscribed.insert((processors.are_oversubscribed(), now)).0,
        }
    }

    fn waited(&mut self, now: Instant) {
        if let Some((wait, rest)) = self.wait.take() {
            self.of(rest).waited(now, &wait);
        }
    }

    fn interrupted(&mut self, now: Instant) {
        if let Some((wait, rest)) = self.wait.take() {
            self.of(rest).interrupted(now, &wait);
        }
    }
}

/// For how long an answer about the processors is used.
const ASKED_AGAIN: Duration = Duration::from_millis(1);
