//! [`Ring`]: ranks that reduce, gather and broadcast together.

mod encoded;
mod fused;
mod operations;
mod threads;

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{Incarnation, Sequence};
use pushpull_common::protocol::message::RingEnd;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_net::HomeProcess;

use crate::config::RingConfig;
use crate::error::{RingError, describe};
use crate::formed_ring::{FormedRing, RankPlace};
use crate::links::{LinkFault, Links, Turn};
use crate::member::MemberFacts;
use crate::metrics::RingMetrics;
use crate::running::{Operand, Running, Task};
use crate::runtime::{Control, ControlConfig, Meeting, NewRing};
use crate::stall::{RingStall, StallWatch};
use crate::transport::Transport;
use crate::waiter::{BlockingWaiter, Waiter, Wanted};
use pushpull_common::launch::Launch;

pub use encoded::EncodedTensor;
pub use fused::Tensor;

/// Ranks that reduce, gather and broadcast together, each in a process of its own.
///
/// Every rank performs the same operations in the same order, on tensors of the same types and
/// lengths. An operation ends on a rank when that has sent and received all of it.
///
/// - **Order.** Chunk `c` of a tensor is combined in rank order beginning at rank `c`, by one rank
///   after the other. So results are bit-equal on all ranks, and between runs with as many ranks.
/// - **Loss.** If a rank is lost, every operation on every other rank returns
///   [`RingError::Lost`], within the lease at the latest. [`Ring::shrink`] goes on without it.
/// - **Differences.** If two ranks perform different operations, all ranks return
///   [`RingError::Difference`], which names both.
/// - **Dropped futures.** The memory of an operation belongs to the caller. If its future is
///   dropped before it is done, the ring is over: the others return [`RingError::GivenUp`].
///
/// A thread of the ring keeps its membership while the program computes. The blocking twin is
/// [`crate::blocking::Ring`]. Its operations move bytes on the calling thread.
#[derive(Debug)]
#[doc(alias = "hvd")]
pub struct Ring {
    config: RingConfig,
    /// The thread that keeps the membership; `None` in a ring of one that nobody can join.
    control: Option<Control>,
    ring: Arc<FormedRing>,
    links: Option<Links>,
    transports: Option<(Transport, Transport)>,
    waiter: Waiter,
    /// The number of the last operation.
    number: u64,
    /// Why the ring is over.
    over: Option<RingError>,
    /// Memory for gathered and fused tensors, in words.
    scratch: Vec<u64>,
    metrics: RingMetrics,
    home: HomeProcess,
}

impl Ring {
    /// Joins the ring of a job: waits until all its ranks have come.
    ///
    /// # Errors
    /// - [`RingError::Config`] for an invalid setting.
    /// - [`RingError::NotFormed`] names the ranks that have not come in time,
    ///   [`RingError::NoRendezvous`] the address that cannot be reached.
    /// - [`RingError::Refused`] if this rank and the others do not agree: on the size, on an index,
    ///   on a fact, or on the build.
    ///
    /// Dropping the future leaves the ring.
    #[doc(alias = "hvd.init")]
    pub async fn join(config: RingConfig) -> Result<Ring, RingError> {
        Ring::join_with(config, Waiter::Async(None)).await
    }

    /// Joins a ring whose operations block the thread that polls them.
    pub(crate) async fn join_blocking(config: RingConfig) -> Result<Ring, RingError> {
        Ring::join_with(config, Waiter::Blocking(BlockingWaiter::new())).await
    }

    async fn join_with(config: RingConfig, waiter: Waiter) -> Result<Ring, RingError> {
        config.check()?;
        let incarnation = Incarnation(random());
        let mut ring = Ring {
            ring: Arc::new(ring_of_one(&config)),
            control: None,
            links: None,
            transports: None,
            waiter,
            number: 0,
            over: None,
            scratch: Vec::new(),
            metrics: RingMetrics { rings: 1, ..RingMetrics::default() },
            home: HomeProcess::current(),
            config,
        };
        let Some(meeting) = meeting(&ring.config) else { return Ok(ring) };
        let mut control = Control::start(control_config(&ring.config, incarnation, meeting))?;
        let formed = control.join(0, ring.config.join_timeout).await;
        ring.control = Some(control);
        ring.metrics.rings = 0;
        ring.enter(formed?)?;
        Ok(ring)
    }

    /// Enters a ring that has formed.
    fn enter(&mut self, formed: NewRing) -> Result<(), RingError> {
        let NewRing { ring, links } = formed;
        self.ring = ring;
        self.number = 0;
        self.over = None;
        self.metrics.rings += 1;
        self.transports = links.as_ref().map(|open| (open.from, open.to));
        self.links = links.map(|open| open.links);
        if let Waiter::Async(_) = self.waiter {
            self.waiter = Waiter::Async(self.watch_links()?);
        }
        Ok(())
    }

    /// The position of this process in the ring, from 0. It may change when the ring shrinks.
    #[doc(alias = "hvd.rank")]
    pub fn rank(&self) -> u32 {
        self.ring.rank
    }

    /// The number of ranks.
    #[doc(alias = "hvd.size")]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The position among the processes of this host, as the launcher has said, from 0. Selects
    /// the device of a process.
    #[doc(alias = "hvd.local_rank")]
    pub fn local_rank(&self) -> u32 {
        self.config.launch.local_rank()
    }

    /// The stable number of this member, from 0. It stays when the ring shrinks.
    pub fn index(&self) -> u32 {
        self.ring.place(self.ring.rank).map_or(0, |place| place.index)
    }

    /// The number of the ring: higher than that of every ring before.
    pub fn epoch(&self) -> u64 {
        self.ring.epoch
    }

    /// The hosts of all ranks, in order of ranks.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.ring.members.iter().map(|place| place.host.as_str())
    }

    /// The number of members that wait for the next ring: [`Ring::regroup`] lets them in.
    pub fn joiners(&self) -> u32 {
        self.control.as_ref().map_or(0, Control::joiners)
    }

    /// The place of this process in its job.
    pub fn launch(&self) -> &Launch {
        &self.config.launch
    }

    /// Returns the counts and times of this rank since it joined.
    pub fn metrics(&self) -> RingMetrics {
        let traffic = self.links.as_ref().map(Links::traffic).unwrap_or_default();
        let mut metrics = self.metrics.clone();
        metrics.bytes_sent += traffic.sent;
        metrics.bytes_received += traffic.received;
        metrics.send += traffic.send;
        metrics.fold += traffic.receive;
        metrics
    }

    /// Forms the next ring with the ranks that are left and those that wait to join, after
    /// [`RingError::may_shrink`]. Every rank that goes on calls it. Ranks are numbered again, in
    /// order of their indices.
    ///
    /// The caller brings the ranks to one state afterwards: [`Ring::newest`] names the rank whose state
    /// the others take.
    ///
    /// # Errors
    /// - [`RingError::NotFormed`] if fewer than [`RingConfig::size_min`] ranks are left.
    /// - [`RingError::Refused`] if the rendezvous was lost together with its host, and half or more
    ///   of the ranks cannot be reached: they might go on as well.
    pub async fn shrink(&mut self) -> Result<(), RingError> {
        self.forget_links();
        let Some(control) = &mut self.control else {
            return match self.over.take() {
                // Another thread has it.
                Some(fenced @ RingError::Fenced { .. }) => Err(self.over.insert(fenced).clone()),
                _ => Ok(()),
            };
        };
        // Until another ring has formed there is none.
        self.over = Some(RingError::Regrouped);
        match control.join(self.ring.epoch, self.config.join_timeout).await {
            Ok(formed) => self.enter(formed),
            Err(error) => {
                self.over = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Lets waiting members in: if there are any, all ranks form the next ring. Every rank calls it
    /// at the same step. Returns whether the ring has changed.
    ///
    /// Costs a small all-reduce while nobody waits.
    ///
    /// # Errors
    /// Those of an operation, and of [`Ring::shrink`].
    pub async fn regroup(&mut self) -> Result<bool, RingError> {
        let mut waiting = [i64::from(self.joiners() > 0)];
        match self.all_reduce(&mut waiting, crate::Reduction::Max).await {
            // A rank that was faster has ended the ring.
            Err(RingError::Regrouped) => waiting[0] = 1,
            reduced => reduced?,
        }
        if waiting[0] == 0 {
            return Ok(false);
        }
        self.over(RingEnd::Regrouped {}).await;
        self.shrink().await?;
        Ok(true)
    }

    /// Ends the ring for all ranks: they get [`RingError::GivenUp`] with this reason. Returns the
    /// reason that this rank gets, which may be an older one.
    pub async fn give_up(&mut self, reason: &str) -> RingError {
        let detail = Detail::shortened(reason);
        self.over(RingEnd::GivenUp { rank: self.ring.rank, detail }).await
    }

    /// Leaves the ring. The others may not use it any more, so a program leaves after its last
    /// operation. A rank that serves the rendezvous waits for the others, for a lease at most.
    #[doc(alias = "hvd.shutdown")]
    pub async fn leave(mut self) {
        self.forget_links();
        if let Some(control) = self.control.take() {
            control.leave().await;
        }
    }

    /// Drops the links of a ring that is over.
    fn forget_links(&mut self) {
        if let Waiter::Async(waiter) = &mut self.waiter {
            *waiter = None;
        }
        if let Some(links) = self.links.take() {
            let traffic = links.traffic();
            self.metrics.bytes_sent += traffic.sent;
            self.metrics.bytes_received += traffic.received;
            self.metrics.send += traffic.send;
            self.metrics.fold += traffic.receive;
        }
    }

    /// Ends the ring for a reason that this rank has found. Returns the reason that all ranks get.
    async fn over(&mut self, end: RingEnd) -> RingError {
        let own = RingError::of_end(&end, u32::MAX, self.ring.epoch);
        let error = match &mut self.control {
            Some(control) => {
                control.report(self.ring.epoch, end).await;
                control.over().await
            }
            None => own,
        };
        self.over = Some(error.clone());
        error
    }

    /// Performs an operation on the elements of `tensor`.
    async fn perform(&mut self, task: &Task<'_>, tensor: &mut [u8]) -> Result<(), RingError> {
        self.perform_on(task, &mut Operand::elements(tensor)).await
    }

    /// Performs an operation.
    async fn perform_on(
        &mut self,
        task: &Task<'_>,
        operand: &mut Operand<'_>,
    ) -> Result<(), RingError> {
        if self.home.is_elsewhere() {
            let detail = format!("it belongs to process {}", self.home.id());
            return Err(RingError::Fenced { detail });
        }
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        self.number += 1;
        self.metrics.operations += 1;
        let mut running =
            Running::new(Sequence(self.number), task, self.ring.rank, self.ring.size());
        if self.links.is_none() {
            // A ring of one may be over as well: its rank was lost, or others wait for the next.
            return match self.control.as_ref().is_some_and(|control| control.wake().is_raised()) {
                true => Err(self.stopped(Stop::Over, &running).await),
                false => Ok(()),
            };
        }
        let mut performing = Performing { ring: self, running: &mut running, is_over: false };
        let performed = performing.perform(operand).await;
        performing.is_over = true;
        drop(performing);
        match performed {
            Ok(()) => Ok(()),
            Err(stop) => {
                // A future that is dropped meanwhile leaves no ring that others could use.
                self.over = Some(RingError::Regrouped);
                let error = self.stopped(stop, &running).await;
                self.over = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Returns the reason why an operation has stopped, as all ranks get it.
    async fn stopped(&mut self, stop: Stop, running: &Running) -> RingError {
        let rank = self.ring.rank;
        let end = match stop {
            Stop::Over => None,
            Stop::Fault(LinkFault::Difference(other)) => Some(RingEnd::Difference {
                number: running.number().0,
                rank: self.ring.predecessor(),
                operation: *other,
                other_rank: rank,
                other: running.operation().clone(),
            }),
            Stop::Fault(LinkFault::Predecessor(fault)) => {
                // Usually the process has ended, and the rendezvous says so.
                self.verdict(format!("its link from rank {}: {fault}", self.ring.predecessor()))
                    .await
            }
            Stop::Fault(LinkFault::Successor(error)) => {
                self.verdict(format!("its link to rank {}: {error}", self.ring.successor())).await
            }
            Stop::Fault(LinkFault::Overflow { element }) => {
                let detail = format!(
                    "the sum of element {element} exceeds its type in operation {}, {}",
                    running.number(),
                    describe(running.operation())
                );
                Some(RingEnd::GivenUp { rank, detail: Detail::shortened(detail) })
            }
            Stop::Stalled => {
                let awaited = self.metrics.waits_for.unwrap_or(rank);
                let detail = format!(
                    "it has waited for rank {awaited} for {:?} to perform operation {}, {}",
                    self.config.operation_timeout,
                    running.number(),
                    describe(running.operation())
                );
                Some(RingEnd::GivenUp { rank, detail: Detail::shortened(detail) })
            }
        };
        match (end, &mut self.control) {
            (Some(end), _) => self.over(end).await,
            (None, Some(control)) => {
                let error = control.over().await;
                self.over = Some(error.clone());
                error
            }
            (None, None) => RingError::Regrouped,
        }
    }

    /// Waits for the rendezvous to say why a link broke, for a lease. Returns an end to report if it
    /// knows nothing.
    async fn verdict(&mut self, detail: String) -> Option<RingEnd> {
        let control = self.control.as_mut()?;
        let lease = self.ring.lease;
        let sleep = {
            let _entered = control.runtime().enter();
            tokio::time::sleep(lease + lease / 4)
        };
        tokio::select! {
            _ = control.over() => None,
            () = sleep => Some(RingEnd::GivenUp {
                rank: self.ring.rank,
                detail: Detail::shortened(detail),
            }),
        }
    }
}

/// An operation under way. Dropped before its end, it gives the ring up.
struct Performing<'a> {
    ring: &'a mut Ring,
    running: &'a mut Running,
    is_over: bool,
}

/// Why an operation has stopped.
enum Stop {
    /// The ring is over.
    Over,
    /// A link broke, or the predecessor performs another operation.
    Fault(LinkFault),
    /// No neighbour has moved for too long.
    Stalled,
}

impl Performing<'_> {
    async fn perform(&mut self, operand: &mut Operand<'_>) -> Result<(), Stop> {
        let ring = &mut *self.ring;
        let (Some(links), Some(control)) = (&mut ring.links, &ring.control) else { return Ok(()) };
        let limit = ring.config.operation_timeout;
        let wake = control.wake();
        let mut waits_since: Option<Instant> = None;
        let mut moved_at = Instant::now();
        let mut stall = StallWatch::new(ring.config.stall_check.as_ref());
        if wake.is_raised() && !control.is_left() {
            return Err(Stop::Over);
        }
        loop {
            let (reads, writes, moved) = match links.turn(self.running, operand) {
                Ok(Turn::Done) => break,
                Ok(Turn::Waits { reads, writes, moved }) => (reads, writes, moved),
                Err(fault) => return Err(Stop::Fault(fault)),
            };
            let now = Instant::now();
            let mut limit = limit;
            let is_over = wake.is_raised();
            if is_over {
                match control.is_left() {
                    // Its last bytes may be on their way: it leaves after its last operation.
                    true => limit = ring.ring.lease,
                    false => return Err(Stop::Over),
                }
            }
            if let Some(since) = waits_since.replace(now) {
                ring.metrics.wait += now.saturating_duration_since(since);
            }
            if moved {
                moved_at = now;
                stall.moved();
                if let Waiter::Blocking(waiter) = &mut ring.waiter {
                    waiter.moved();
                }
            }
            let still = now.saturating_duration_since(moved_at);
            let left = limit.saturating_sub(still);
            if left.is_zero() {
                return Err(if is_over { Stop::Over } else { Stop::Stalled });
            }
            let awaited = if reads { ring.ring.predecessor() } else { ring.ring.successor() };
            ring.metrics.waits_for = Some(awaited);
            let next = stall.waits(still, |since| RingStall {
                number: self.running.number().0,
                operation: describe(self.running.operation()),
                rank: awaited,
                host: ring.ring.place(awaited).map_or_else(String::new, |of| of.host.clone()),
                since,
            });
            let left = left.min(next);
            let wanted = Wanted { reads, writes, end: !is_over };
            let waited = match &mut ring.waiter {
                Waiter::Blocking(waiter) => {
                    let waited = waiter.wait(links, wake, wanted, left.min(BLOCKED_MAX));
                    if moved_at.elapsed() >= BLOCKED_MAX {
                        // The caller may wait for something else as well, such as an interrupt.
                        yield_once().await;
                    }
                    waited
                }
                Waiter::Async(Some(waiter)) => {
                    let sleep = {
                        let _entered = control.runtime().enter();
                        tokio::time::sleep(left)
                    };
                    tokio::select! {
                        waited = waiter.wait(links, wanted) => waited,
                        () = sleep => Ok(()),
                    }
                }
                Waiter::Async(None) => Ok(()),
            };
            waited.map_err(Stop::Fault)?;
        }
        if let Some(since) = waits_since {
            ring.metrics.wait += since.elapsed();
        }
        if let Waiter::Blocking(waiter) = &mut ring.waiter {
            waiter.moved();
        }
        Ok(())
    }
}

impl Drop for Performing<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let operation = describe(self.running.operation());
            self.ring.try_give_up(&format!("the future of its {operation} was dropped"));
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if let Some(control) = self.control.take().filter(|_| !self.home.is_elsewhere()) {
            let detail = Text::clipped("its ring was dropped");
            control.abandon(self.ring.epoch, RingEnd::GivenUp { rank: self.ring.rank, detail });
        }
    }
}

/// Says the rank, its neighbours and how it is connected to them.
impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ring = &*self.ring;
        let host = |rank: u32| ring.place(rank).map_or("", |place| place.host.as_str());
        write!(f, "rank {} of {} on {}", ring.rank, ring.size(), host(ring.rank))?;
        if let Some((from, to)) = self.transports {
            let predecessor = ring.predecessor();
            let successor = ring.successor();
            write!(f, ", from rank {predecessor} on {} over {from}", host(predecessor))?;
            write!(f, ", to rank {successor} on {} over {to}", host(successor))?;
        }
        write!(f, ", epoch {}", ring.epoch)?;
        match ring.serving {
            Some(rank) => write!(f, ", rendezvous in rank {rank}"),
            None => Ok(()),
        }
    }
}

/// How long a blocking operation keeps its thread from what else its caller waits for.
const BLOCKED_MAX: Duration = Duration::from_millis(50);

/// Lets the caller look at what else it waits for, and continues at once.
async fn yield_once() {
    let mut has_yielded = false;
    std::future::poll_fn(|context| match std::mem::replace(&mut has_yielded, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The host of this process.
fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn ring_of_one(config: &RingConfig) -> FormedRing {
    FormedRing {
        rendezvous: 0,
        epoch: 1,
        rank: 0,
        members: vec![RankPlace {
            index: 0,
            process: Incarnation(0),
            host: host(),
            addresses: Vec::new(),
        }],
        lease: config.lease,
        serving: None,
    }
}

/// Returns where the ranks meet; `None` in a job of one that nobody else can find.
fn meeting(config: &RingConfig) -> Option<Meeting> {
    match (&config.rendezvous, config.launch.job_key()) {
        (Some(address), _) => Some(Meeting::Address(address.clone())),
        (None, Some(key)) if config.launch.size() > 1 || config.size_min.is_some() => {
            Some(Meeting::Folder(config.folder.join(format!("pushpull-ring-{key}"))))
        }
        _ => None,
    }
}

fn control_config(
    config: &RingConfig,
    incarnation: Incarnation,
    meeting: Meeting,
) -> ControlConfig {
    let size = config.launch.size();
    let lease_ms = config.lease.as_millis();
    let identity = Identity::new()
        .with_protocol()
        .with("lease", format!("{lease_ms} ms"))
        .with("crate", env!("CARGO_PKG_VERSION"));
    let facts = config.facts.iter();
    let identity = facts.fold(identity, |identity, (name, value)| identity.with(name, value));
    let rank = config.launch.rank();
    ControlConfig {
        facts: MemberFacts {
            job: config.job.clone(),
            id: config.id.clone().unwrap_or_else(|| format!("rank {rank}")),
            index: config.has_index.then_some(rank),
            size,
            host: host(),
            addresses: Vec::new(),
            incarnation,
            identity,
            lease: config.lease,
        },
        meeting,
        socket_folder: PathBuf::from(&config.folder),
        socket: random(),
        transport: config.transport,
        insecure: config.insecure,
        credentials: config.credentials.clone(),
        access: config.access.clone(),
        first_size_min: config.size_min.unwrap_or(size),
        size_min: config.size_min.unwrap_or(1),
        join_window: config.join_window,
        rendezvous: random(),
    }
}
