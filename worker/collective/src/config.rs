//! [`RingConfig`]: the settings of a rank.

use std::path::PathBuf;
use std::time::Duration;

use pushpull_common::protocol::limits;

use crate::error::RingError;
use crate::stall::{RingStall, StallCheck};
use crate::transport::Transport;
use pushpull_common::access::AccessEvent;
use pushpull_common::launch::Launch;
use pushpull_net::auth::{AccessReport, Credentials};

/// The settings of a rank.
///
/// ```
/// # use std::time::Duration;
/// use pushpull_collective::{Launch, RingConfig};
///
/// let launch = Launch::new(0, 4)?;
/// let config = RingConfig::new(launch).rendezvous("127.0.0.1:29500").lease(Duration::from_secs(5));
/// # Ok::<(), pushpull_collective::LaunchError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RingConfig {
    pub(crate) launch: Launch,
    pub(crate) job: String,
    pub(crate) id: Option<String>,
    pub(crate) has_index: bool,
    pub(crate) rendezvous: Option<String>,
    pub(crate) folder: PathBuf,
    pub(crate) transport: Option<Transport>,
    pub(crate) insecure: bool,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) access: AccessReport,
    pub(crate) size_min: Option<u32>,
    pub(crate) lease: Duration,
    pub(crate) join_timeout: Duration,
    pub(crate) join_window: Duration,
    pub(crate) operation_timeout: Duration,
    pub(crate) stall_check: Option<StallCheck>,
    pub(crate) non_finite_is_error: bool,
    pub(crate) facts: Vec<(String, String)>,
}

impl RingConfig {
    /// Creates the settings of the process with this place in its job.
    ///
    /// The ranks meet at [`Launch::rendezvous`]. Without an address they meet in a private folder
    /// of this host, whose name is the job's [`Launch::job_key`].
    pub fn new(launch: Launch) -> RingConfig {
        RingConfig {
            rendezvous: launch.rendezvous().map(str::to_owned),
            launch,
            job: "ring".to_owned(),
            id: None,
            has_index: true,
            folder: PathBuf::from("/dev/shm"),
            transport: None,
            insecure: false,
            credentials: None,
            access: AccessReport::default(),
            size_min: None,
            lease: Duration::from_secs(10),
            join_timeout: Duration::from_secs(300),
            join_window: Duration::from_secs(1),
            operation_timeout: Duration::from_secs(600),
            stall_check: None,
            non_finite_is_error: false,
            facts: Vec::new(),
        }
    }

    /// Sets the address at which the ranks meet, `host:port`. The first rank on its host listens
    /// there unless another process does; in a ring with [`RingConfig::size_min`] only that of index
    /// 0. An address beyond loopback needs [`RingConfig::credentials`] or [`RingConfig::insecure`].
    pub fn rendezvous(mut self, address: impl Into<String>) -> RingConfig {
        self.rendezvous = Some(address.into());
        self
    }

    /// Sets the folder of Unix sockets, and of the private folders in which ranks of one host meet.
    /// It must be on a local file system. Default: `/dev/shm`.
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> RingConfig {
        self.folder = folder.into();
        self
    }

    /// Sets the name of the ring. Rings of two names do not mix at one rendezvous. Default: `ring`.
    pub fn job(mut self, job: impl Into<String>) -> RingConfig {
        self.job = job.into();
        self
    }

    /// Sets the stable id of this member. A process that is started again under its id gets its
    /// index back. Default: `rank` and the rank of the launcher.
    pub fn id(mut self, id: impl Into<String>) -> RingConfig {
        self.id = Some(id.into());
        self
    }

    /// Lets the rendezvous assign the index, in order of arrival, instead of the launcher.
    pub fn any_index(mut self) -> RingConfig {
        self.has_index = false;
        self
    }

    /// Restricts links to one transport. Default: within a host shared memory, or a Unix socket where
    /// the system shares none; TCP between hosts. With [`Transport::SharedMemory`] a ring does not
    /// form without it.
    pub fn transport(mut self, transport: Transport) -> RingConfig {
        self.transport = Some(transport);
        self
    }

    /// Allows addresses beyond loopback. Whoever reaches them may join the ring and read its
    /// tensors: use it on a private network alone.
    pub fn insecure(mut self) -> RingConfig {
        self.insecure = true;
        self
    }

    /// Sets what the ranks prove themselves with to each other: an access token whose role is `rank`,
    /// or certificates. With a certificate and an authority links between hosts are encrypted, and
    /// addresses beyond loopback are allowed. Such a certificate names the addresses of its host.
    /// Default: none.
    pub fn credentials(mut self, credentials: impl Into<Option<Credentials>>) -> RingConfig {
        self.credentials = credentials.into();
        self
    }

    /// Calls `report` for what happens to those who may connect to this rank: peers that have not proved
    /// that they may, for the first attempt of a host and then every ten seconds at most; connections
    /// that are closed because an access token was removed; credentials that have become unusable.
    /// Default: no reports.
    ///
    /// The control thread of the ring calls `report`, which must not wait for this ring.
    pub fn on_access(
        mut self,
        report: impl Fn(&AccessEvent) + Send + Sync + 'static,
    ) -> RingConfig {
        self.access = AccessReport::new(report);
        self
    }

    /// Makes the ring elastic: it forms with at least this many members, and shrinks no further.
    /// Default: the first ring needs all ranks of the launcher, a later one a single rank.
    pub fn size_min(mut self, members: u32) -> RingConfig {
        self.size_min = Some(members);
        self
    }

    /// Sets the lease: a rank that is silent for this long is lost. Default: 10 s.
    pub fn lease(mut self, lease: Duration) -> RingConfig {
        self.lease = lease;
        self
    }

    /// Sets the time that a ring may take to form. Default: 5 min.
    pub fn join_timeout(mut self, within: Duration) -> RingConfig {
        self.join_timeout = within;
        self
    }

    /// Sets the time that an elastic ring waits for more members once it may form. Default: 1 s.
    pub fn join_window(mut self, window: Duration) -> RingConfig {
        self.join_window = window;
        self
    }

    /// Sets the longest time that an operation may stand still, because a rank has not come to it.
    /// The rank that has waited for so long gives the ring up. Default: 10 min.
    #[doc(alias = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")]
    pub fn operation_timeout(mut self, limit: Duration) -> RingConfig {
        self.operation_timeout = limit;
        self
    }

    /// Has an operation that stands still for this long reported, and again in this interval: it
    /// waits for a rank that has not come to it. Horovod warns after 60 s. Default: no report.
    ///
    /// `report` runs on the thread that performs the operation, and must not wait. A panic in it
    /// ends the operation, and so the ring.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pushpull_collective::{Launch, RingConfig};
    /// let config = RingConfig::new(Launch::new(0, 4)?).rendezvous("127.0.0.1:29500");
    /// let config = config.on_stall(Duration::from_secs(60), |stall| eprintln!("{stall}"));
    /// # Ok::<(), pushpull_collective::LaunchError>(())
    /// ```
    #[doc(alias = "HOROVOD_STALL_CHECK_TIME_SECONDS")]
    pub fn on_stall(
        mut self,
        after: Duration,
        report: impl Fn(&RingStall) + Send + Sync + 'static,
    ) -> RingConfig {
        self.stall_check = Some(StallCheck::new(after, report));
        self
    }

    /// Refuses NaN and infinities in what a rank contributes: [`RingError::NonFinite`] there, and
    /// [`RingError::GivenUp`] on the others. Costs one pass over each contribution. Default: they
    /// are reduced like other values.
    pub fn reject_non_finite(mut self) -> RingConfig {
        self.non_finite_is_error = true;
        self
    }

    /// Adds a fact on which all ranks must agree, such as the digest of a configuration. A rank
    /// with another value, or without the fact, is refused, and the fact named.
    pub fn fact(mut self, name: impl Into<String>, value: impl Into<String>) -> RingConfig {
        self.facts.push((name.into(), value.into()));
        self
    }

    /// Checks the settings.
    pub(crate) fn check(&self) -> Result<(), RingError> {
        let fault =
            |setting, value: String, expected| Err(RingError::Config { setting, value, expected });
        let size = self.launch.size();
        let fits = |text: &str, bytes_max: usize| !text.is_empty() && text.len() <= bytes_max;
        if !fits(&self.job, limits::JOB_BYTES_MAX) {
            return fault("the job", format!("{:?}", self.job), "1 to 64 bytes");
        }
        if let Some(id) = self.id.as_ref().filter(|id| !fits(id, limits::RANK_ID_BYTES_MAX)) {
            return fault("the id", format!("{id:?}"), "1 to 64 bytes");
        }
        if let Some(least) = self.size_min.filter(|least| *least == 0 || *least > size) {
            return fault("the least size", least.to_string(), "1 to the size of the job");
        }
        let stall = self.stall_check.as_ref().map(|check| ("the stall check", check.after));
        let times = [("the lease", self.lease), ("the operation timeout", self.operation_timeout)];
        for (setting, duration) in times.into_iter().chain(stall) {
            if duration < LEAST_DURATION || duration > LARGEST_DURATION {
                return fault(setting, format!("{duration:?}"), "10 ms to 30 days");
            }
        }
        if self.join_timeout > LARGEST_DURATION || self.join_window > LARGEST_DURATION {
            let longest = self.join_timeout.max(self.join_window);
            return fault("the time to join", format!("{longest:?}"), "at most 30 days");
        }
        if self.rendezvous.is_none() && self.launch.job_key().is_none() && size > 1 {
            let expected = "an address host:port, because no launcher names the job";
            return fault("the rendezvous", "absent".to_owned(), expected);
        }
        Ok(())
    }
}

/// The shortest lease: a heartbeat needs time to be sent and read.
const LEAST_DURATION: Duration = Duration::from_millis(10);
/// The longest time of any wait: sums with a clock stay in range.
const LARGEST_DURATION: Duration = Duration::from_secs(30 * 24 * 60 * 60);
