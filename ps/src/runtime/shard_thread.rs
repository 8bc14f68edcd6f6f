//! A shard's thread: one runtime for the shard, its connections, its clock and its long work.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{FrameReader, Header};
use pushpull_net::{AdaptiveSpin, DetachedStream, Processors, SpinLimits, SpinWait};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::connection;
use super::outbox::{Outbox, SentAnswer};
use super::owner_link::{self, OwnerAddress, UnsentFrames};
use crate::checkpoint::CheckpointStorage;
use crate::event::EventSink;
use crate::shard::checkpoints::{SaverEvent, SaverOrder};
use crate::shard::output::ShardOutput;
use crate::shard::power::Flush;
use crate::shard::work::Work;
use crate::shard::{PeerOrigin, Shard, ShardInput, TICK};

/// How long a stopping shard may take to finish whole pushes and to send answers.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a blocked shard checks whether readers of shared memory have released their blocks:
/// about as long as reading the values of a small model takes.
const BLOCKED_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A peer that has said hello, on its way to its shard's thread.
#[derive(Debug)]
pub(super) struct ArrivedPeer {
    pub(super) stream: DetachedStream,
    pub(super) reader: FrameReader,
    pub(super) header: Header,
    pub(super) hello: Hello,
    pub(super) origin: PeerOrigin,
}

/// How many members have ever joined a shard, and how many are present.
pub(super) type Members = (usize, usize);

/// The shard and its connections, shared by the tasks of its thread.
#[derive(Debug)]
pub(super) struct ShardCore {
    shard: RefCell<Shard>,
    outboxes: RefCell<HashMap<u64, Rc<Outbox>>>,
    next_connection: Cell<u64>,
    work: Notify,
    /// Outboxes with a corked frame, which is sent when no work is left or at the next tick.
    corked: RefCell<Vec<Rc<Outbox>>>,
    /// Since when an update has waited for memory that pulls hold.
    blocked_since: Cell<Option<Instant>>,
    idle: Notify,
    members: watch::Sender<Members>,
    stall_timeout: Duration,
    storage: Option<Arc<dyn CheckpointStorage>>,
    events: EventSink,
    orders: Option<mpsc::Sender<SaverOrder>>,
    /// Frames for the step owner, in synchronous mode.
    unsent: RefCell<UnsentFrames>,
    to_owner: Notify,
    file_jobs: RefCell<VecDeque<ShardOutput>>,
    file_job_ready: Notify,
    flush: RefCell<Option<Box<Flush>>>,
    flush_due: Notify,
    flushed: Notify,
    /// Orders that did not fit into the saver's channel yet.
    queued_orders: RefCell<VecDeque<SaverOrder>>,
    spin: RefCell<PeerSpin>,
    processors: Processors,
    /// Notified when a wait for a peer begins that may be polled.
    polls: Notify,
}

/// A shard thread's connections to the checkpoints, the step owner and the event sink.
#[derive(Debug, Default)]
pub(super) struct ShardLinks {
    pub(super) storage: Option<Arc<dyn CheckpointStorage>>,
    /// Set only on the shard that owns the step.
    pub(super) saver: Option<(mpsc::Sender<SaverOrder>, mpsc::Receiver<SaverEvent>)>,
    /// Set in synchronous mode, on every other shard.
    pub(super) owner: Option<OwnerAddress>,
    pub(super) events: EventSink,
}

impl ShardCore {
    /// Registers a new connection and returns its number and its outbox.
    pub(super) fn register(&self) -> (u64, Rc<Outbox>) {
        let connection = self.next_connection.get();
        self.next_connection.set(connection + 1);
        let outbox = Rc::<Outbox>::default();
        self.outboxes.borrow_mut().insert(connection, outbox.clone());
        (connection, outbox)
    }

    /// Removes a connection and releases its pins.
    pub(super) fn forget(&self, connection: u64) {
        if let Some(outbox) = self.outboxes.borrow_mut().remove(&connection) {
            self.corked.borrow_mut().retain(|other| !Rc::ptr_eq(other, &outbox));
        }
        self.handle(ShardInput::Disconnected { connection });
        self.work.notify_one();
        self.idle.notify_one();
    }

    /// Passes an input to the shard and carries out its outputs.
    pub(super) fn handle(&self, input: ShardInput<'_>) {
        let now = Instant::now();
        self.spin.borrow_mut().interrupted(now);
        let mut shard = self.shard.borrow_mut();
        shard.handle(now, input);
        // A small push is applied here, at once. Only the rest of a long one is left to the work
        // loop.
        let mut work = Work::Idle;
        if shard.has_work() {
            work = self.track_blocked(now, shard.work(now));
            match work {
                Work::More => self.work.notify_one(),
                // Readers of shared memory do not announce when they release a block.
                Work::Blocked if shard.is_shared() => self.work.notify_one(),
                _ => {}
            }
        }
        self.deliver(&mut shard, work);
    }

    /// Calls `receive` with the memory for the body of a connection's last message.
    pub(super) fn with_body<R>(
        &self,
        connection: u64,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        self.shard.borrow_mut().with_body(connection, receive)
    }

    /// Takes back the memory of a sent answer and wakes an update that waited for it.
    pub(super) fn answered(&self, answer: SentAnswer) {
        match answer {
            SentAnswer::Rows(rows) => self.shard.borrow_mut().rows_sent(rows),
            SentAnswer::Values(buffers) => {
                self.shard.borrow_mut().pull_sent(buffers);
                self.released();
            }
        }
    }

    /// Wakes the work loop: memory that an update waited for may be free.
    fn released(&self) {
        if self.shard.borrow().has_work() {
            self.work.notify_one();
        }
    }

    /// Emits an event, if there is one, to the server's event sink.
    pub(super) fn emit(&self, event: Option<crate::event::Event>) {
        event.iter().for_each(|event| self.events.emit(event));
    }

    pub(super) fn fault(&self) {
        self.shard.borrow().count_fault();
    }

    /// Carries out the shard's outputs. Frames that can wait are corked while there is work.
    fn deliver(&self, shard: &mut Shard, work: Work) {
        while let Some(output) = shard.poll_output() {
            match output {
                ShardOutput::Send { connection, envelope, message, body, crc, can_wait } => {
                    let Some(outbox) = self.outbox(connection) else {
                        continue;
                    };
                    outbox.put(&envelope, &message, crc, body);
                    if can_wait && work == Work::More && !outbox.is_full() {
                        self.corked.borrow_mut().push(outbox);
                    } else {
                        outbox.send_all();
                    }
                }
                ShardOutput::Shared { connection, envelope, message, descriptors } => {
                    if let Some(outbox) = self.outbox(connection) {
                        outbox.put_shared(&envelope, &message, descriptors);
                        outbox.send_all();
                    }
                }
                ShardOutput::Stream { connection, parts } => {
                    if let Some(outbox) = self.outbox(connection) {
                        outbox.put_parts(parts);
                        outbox.send_all();
                    }
                }
                ShardOutput::Close { connection } => {
                    if let Some(outbox) = self.outbox(connection) {
                        outbox.close();
                    }
                }
                ShardOutput::SaverOrder(order) => self.order(order),
                output @ (ShardOutput::SaveShard(_) | ShardOutput::RestoreShard(_)) => {
                    self.file_jobs.borrow_mut().push_back(output);
                    self.file_job_ready.notify_one();
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
                // The receiver may be closed while the server stops.
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

    /// Returns the frames that wait for the connection to the step owner.
    pub(super) fn unsent(&self) -> &RefCell<UnsentFrames> {
        &self.unsent
    }

    /// Returns the notification that such frames exist.
    pub(super) fn to_owner(&self) -> &Notify {
        &self.to_owner
    }

    /// Queues an order for the saver and sends what its channel takes.
    fn order(&self, order: SaverOrder) {
        self.queued_orders.borrow_mut().push_back(order);
        self.send_orders();
    }

    fn send_orders(&self) {
        let mut left = self.queued_orders.borrow_mut();
        while let (Some(orders), Some(order)) = (&self.orders, left.pop_front()) {
            if let Err(TrySendError::Full(order)) = orders.try_send(order) {
                left.push_front(order);
                return;
            }
        }
        left.clear();
    }

    /// Runs saves and restores one at a time, on threads that may block on a disk.
    async fn run_file_jobs(&self) {
        loop {
            let job = self.file_jobs.borrow_mut().pop_front();
            let storage = self.storage.clone();
            match (job, storage) {
                (Some(ShardOutput::SaveShard(save)), Some(storage)) => {
                    let (connection, request) = (save.connection, save.request);
                    let saved = tokio::task::spawn_blocking(move || save.run(storage)).await;
                    let result = saved.unwrap_or_else(|panic| Err(panic.to_string()));
                    self.handle(ShardInput::ShardSaved { connection, request, result });
                    // The save has released its pins.
                    self.released();
                }
                (Some(ShardOutput::RestoreShard(restore)), Some(storage)) => {
                    let restored = tokio::task::spawn_blocking(move || restore.run(storage)).await;
                    match restored {
                        Ok(restored) => self.handle(ShardInput::ShardRestored(Box::new(restored))),
                        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                    }
                }
                _ => self.file_job_ready.notified().await,
            }
        }
    }

    /// Flushes images to the disk until the thread ends.
    async fn keep_flushing(&self) {
        loop {
            while self.flush_once().await {}
            self.flush_due.notified().await;
        }
    }

    /// Flushes the image that is due. Returns false if none is.
    async fn flush_once(&self) -> bool {
        let Some(flush) = self.flush.borrow_mut().take() else { return false };
        let flushed = tokio::task::spawn_blocking(move || flush.run()).await;
        let result = flushed.unwrap_or_else(|panic| Err(panic.to_string()));
        self.handle(ShardInput::Flushed(result));
        // Blocks that only older images named are free.
        self.released();
        self.flushed.notify_one();
        true
    }

    /// Passes the saver's events to the shard.
    async fn receive_saver_events(&self, mut events: mpsc::Receiver<SaverEvent>) {
        while let Some(event) = events.recv().await {
            self.handle(ShardInput::SaverEvent(event));
        }
        std::future::pending().await
    }

    /// Begins an adaptive spin for a peer: with `rest`, for the rest of a frame or of a write;
    /// otherwise for the next request.
    pub(super) fn wait_for_peers(&self, rest: bool) {
        let (now, mut spin) = (Instant::now(), self.spin.borrow_mut());
        spin.begin(now, rest);
        if spin.polls(now, &self.processors) {
            self.polls.notify_one();
        }
    }

    /// Ends the wait: the peer's socket is ready.
    pub(super) fn peer_ready(&self) {
        self.spin.borrow_mut().waited(Instant::now());
    }

    /// Polls the sockets while a peer is expected soon.
    async fn keep_polling(&self) {
        loop {
            self.polls.notified().await;
            while self.spin.borrow_mut().polls(Instant::now(), &self.processors) {
                // The runtime checks all sockets and timers before it returns here.
                tokio::task::yield_now().await;
            }
        }
    }

    fn outbox(&self, connection: u64) -> Option<Rc<Outbox>> {
        self.outboxes.borrow().get(&connection).cloned()
    }

    /// Does the shard's long work in slices until the thread ends.
    async fn keep_working(&self) {
        loop {
            self.work.notified().await;
            loop {
                match self.work_slice() {
                    // The other tasks of this thread run between two slices.
                    Work::More => tokio::task::yield_now().await,
                    Work::Blocked if self.shard.borrow().is_shared() => {
                        tokio::time::sleep(BLOCKED_POLL_INTERVAL).await;
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
        let work = self.track_blocked(now, shard.work(now));
        self.deliver(&mut shard, work);
        work
    }

    /// Records since when updates are blocked, and returns `work`.
    fn track_blocked(&self, now: Instant, work: Work) -> Work {
        let since = self.blocked_since.get().filter(|_| work == Work::Blocked);
        self.blocked_since.set(since.or((work == Work::Blocked).then_some(now)));
        work
    }

    /// Cuts off the oldest pull in progress once an update has waited `stall_timeout` for its
    /// memory. One slow reader delays updates by no more than that.
    fn cut_slowest_pull(&self, now: Instant) {
        let Some(since) = self.blocked_since.get() else { return };
        if now.saturating_duration_since(since) < self.stall_timeout {
            return;
        }
        // A reader of shared memory has held its blocks since before the update blocked: the values
        // have not changed since.
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

    /// Ticks the shard and cuts off stalled connections.
    async fn keep_ticking(&self) {
        let mut interval = tokio::time::interval(TICK);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.handle(ShardInput::Tick);
            // If there is always work, nothing else sends these.
            self.send_corked();
            self.send_orders();
            let now = Instant::now();
            self.cut_slowest_pull(now);
            let stalled = self.shard.borrow_mut().revoke_stalled_readers(now, self.stall_timeout);
            self.cut(&stalled);
            for outbox in self.outboxes.borrow().values() {
                let stalled = [outbox.stuck_since.get(), outbox.partial_since.get()]
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

    /// Finishes whole pushes, sends the remaining frames and closes every connection.
    async fn drain(&self) {
        let finish = async {
            // An update may wait for a flush, and its answer for another.
            loop {
                let work = self.work_slice();
                // Corked frames must not wait for work that may outlast the timeout.
                self.send_corked();
                match work {
                    Work::More => tokio::task::yield_now().await,
                    Work::Blocked if self.shard.borrow().is_shared() => {
                        tokio::time::sleep(BLOCKED_POLL_INTERVAL).await;
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
        // Peers that do not read their answers in time are cut off.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, finish).await;
    }

    /// Waits for the flush under way, as dropping the runtime would. If the flush fails, the files
    /// must record that for the next process.
    async fn await_flush(&self) {
        self.outboxes.borrow().values().for_each(|outbox| outbox.break_off());
        while self.shard.borrow().is_flushing() {
            self.flushed.notified().await;
        }
    }
}

/// Runs a shard on the calling thread until `stop`.
pub(super) fn run(
    shard: Shard,
    mut arrivals: mpsc::Receiver<ArrivedPeer>,
    members: watch::Sender<Members>,
    (stall_timeout, busy_poll): (Duration, Duration),
    links: ShardLinks,
    stop: &CancellationToken,
) -> std::io::Result<()> {
    let (orders, saver_events) = links.saver.unzip();
    // Without a saver this channel never yields an event.
    let saver_events = saver_events.unwrap_or_else(|| mpsc::channel(1).1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let core = Rc::new(ShardCore {
        shard: RefCell::new(shard),
        outboxes: RefCell::default(),
        next_connection: Cell::new(1),
        work: Notify::new(),
        corked: RefCell::default(),
        blocked_since: Cell::new(None),
        idle: Notify::new(),
        members,
        stall_timeout,
        storage: links.storage,
        events: links.events,
        orders,
        unsent: RefCell::default(),
        to_owner: Notify::new(),
        file_jobs: RefCell::default(),
        file_job_ready: Notify::new(),
        flush: RefCell::default(),
        flush_due: Notify::new(),
        flushed: Notify::new(),
        queued_orders: RefCell::default(),
        spin: RefCell::new(PeerSpin::new(busy_poll)),
        processors: Processors::current(),
        polls: Notify::new(),
    });
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let flushing = core.clone();
        // This task outlives the others: answers wait for a flush while the server stops.
        tokio::task::spawn_local(async move { flushing.keep_flushing().await });
        let serve = async {
            while let Some(arrived) = arrivals.recv().await {
                tokio::task::spawn_local(connection::serve(core.clone(), arrived));
            }
        };
        let keep_owner_link = async {
            match links.owner {
                Some(owner) => owner_link::run(core.clone(), owner).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = keep_owner_link => {}
            () = core.keep_working() => {}
            () = core.keep_ticking() => {}
            () = core.keep_polling() => {}
            () = core.run_file_jobs() => {}
            () = core.receive_saver_events(saver_events) => {}
            () = serve => {}
        }
        drop(arrivals);
        // File I/O under way ends after its current piece; this thread waits for it.
        core.shard.borrow().abandon_files();
        core.drain().await;
        core.await_flush().await;
    });
    Ok(())
}

/// Adaptive spinning of a shard's thread while it waits for its peers.
///
/// Waits for the rest of a frame or of a write have a history of their own: a peer that computes
/// before a large request sends the whole request at once.
#[derive(Debug)]
struct PeerSpin {
    requests: AdaptiveSpin,
    rests: AdaptiveSpin,
    /// The current wait, and whether it is for a rest.
    wait: Option<(SpinWait, bool)>,
    /// Whether other threads wanted the processor, and when that was checked.
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

    /// Checks at most once per [`OVERSUBSCRIPTION_RECHECK`]: a check takes 2 us.
    fn is_oversubscribed(&mut self, now: Instant, processors: &Processors) -> bool {
        match self.oversubscribed {
            Some((answer, checked))
                if now.saturating_duration_since(checked) < OVERSUBSCRIPTION_RECHECK =>
            {
                answer
            }
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

/// How long a check for oversubscription stays valid.
const OVERSUBSCRIPTION_RECHECK: Duration = Duration::from_millis(1);
