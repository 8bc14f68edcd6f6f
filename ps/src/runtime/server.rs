//! A parameter server: listen, start, serve, stop.

use std::any::Any;
use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

use pushpull_checkpoint::{AbandonFlag, StorageClaim};
use pushpull_common::identity::Identity;
use pushpull_common::ids::ShardId;
use pushpull_store::arena::{ArenaStorage, Budget, StateDirectory};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::accept::{self, Acceptor};
use super::descriptor_watch::DescriptorWatch;
use super::handle::{PsHandle, ServerEnd};
use super::listener::PsListener;
use super::owner_link::OwnerAddress;
use super::publisher::Publisher;
use super::saver::{self, Saver};
use super::shard_thread::{self, ShardLinks};
use crate::config::{Durability, PsConfig};
use crate::error::{ListenError, ServeError, StartError, StorageError};
use crate::metrics::{Counters, SaveRecord};
use crate::peer_hello::PeerHello;
use crate::shard::Shard;
use crate::shard::opening::shard_setup::{ServerRun, ShardSetup};
use pushpull_net::auth::Credentials;
use pushpull_net::{AcceptLimits, HomeProcess};

/// The capacity of the channels of orders to the saver and of events from it.
const ORDERS_MAX: usize = 64;

/// The capacity of the channel of sockets to a shard; more wait in the accepting thread.
const ARRIVALS_MAX: usize = 64;

/// A running parameter server: one task of the job that holds the variables, normally `ps`.
///
/// It runs on its own threads and needs no runtime from its caller. Dropping it stops it and waits
/// for its threads.
///
/// ```
/// # use pushpull_common::{cluster::ClusterSpec, ids::TaskId};
/// # use pushpull_ps::{Adam, Ps, PsConfig};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // The cluster names the port that the system chose.
/// let listener = Ps::listen("127.0.0.1:0").await?;
/// let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build()?;
/// let ps = listener.start(PsConfig::new(cluster, TaskId::ps(0), Adam::default()))?;
/// ps.serve(async { /* until this future completes */ }).await?;
/// # Ok(()) }
/// ```
#[doc(alias = "tf.train.Server")]
#[doc(alias = "tf.distribute.Server")]
#[derive(Debug)]
pub struct Ps {
    handle: PsHandle,
    threads: Vec<(String, JoinHandle<io::Result<()>>)>,
    /// Closed when every thread has ended.
    ended: mpsc::Receiver<()>,
    _state: Option<StateDirectory>,
    /// Keeps other clusters out of the checkpoints.
    _claim: StorageClaim,
}

impl Ps {
    /// Binds `host:port` on loopback, or `unix:/path`. Port 0 takes a free port.
    ///
    /// Connections queue up from now on; [`PsListener::start`] serves them.
    pub async fn listen(address: &str) -> Result<PsListener, ListenError> {
        PsListener::bind(address, false)
    }

    /// Binds an address that other machines may reach, for those whom the credentials let in:
    /// connections are encrypted, and each peer proves who it is. Otherwise like [`Ps::listen`].
    ///
    /// # Errors
    /// [`ListenError::Exposed`] if the credentials have no certificate, or neither access tokens nor
    /// an authority, and other machines may reach the address.
    pub async fn listen_secured(
        address: &str,
        credentials: &Credentials,
    ) -> Result<PsListener, ListenError> {
        let listener = PsListener::bind(address, credentials.protect())?;
        Ok(PsListener { credentials: Some(credentials.clone()), ..listener })
    }

    /// Binds an address that other machines may reach; otherwise like [`Ps::listen`]. Any client that
    /// can connect can read and change the variables.
    pub async fn listen_insecure(address: &str) -> Result<PsListener, ListenError> {
        PsListener::bind(address, true)
    }

    /// Returns a handle on the server.
    pub fn handle(&self) -> PsHandle {
        self.handle.clone()
    }

    /// Serves until `shutdown` completes, [`PsHandle::stop`] is called, or all workers are gone
    /// ([`PsConfig::exit_when_done`]); then drains, ends every thread, and frees the port and the
    /// files.
    ///
    /// Dropping the future also stops the server.
    #[doc(alias = "join")]
    pub async fn serve(mut self, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        self.check_home()?;
        let stop = self.handle.stop.clone();
        let mut shutdown = std::pin::pin!(shutdown);
        let mut stopped = std::pin::pin!(stop.cancelled());
        std::future::poll_fn(|context| {
            let done = shutdown.as_mut().poll(context).is_ready()
                || stopped.as_mut().poll(context).is_ready();
            if done { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        self.handle.suspend();
        while self.ended.recv().await.is_some() {}
        self.join()
    }

    /// Checks that this is the process of the server. A child of `fork` has none of its threads, and
    /// would wait for their ends for ever.
    fn check_home(&mut self) -> Result<(), ServeError> {
        let home = &self.handle.home;
        if !home.is_elsewhere() {
            return Ok(());
        }
        self.threads.drain(..).for_each(std::mem::forget);
        Err(ServeError::Forked { parent: home.id() })
    }

    /// Joins the threads and returns the first failure.
    pub(crate) fn join(&mut self) -> Result<(), ServeError> {
        self.check_home()?;
        let mut result = Ok(());
        for (thread, handle) in self.threads.drain(..) {
            let error = match handle.join() {
                Ok(Ok(())) => continue,
                Ok(Err(source)) => ServeError::Thread { thread, source },
                Err(panic) => ServeError::Panicked { thread, panic: panic_text(&*panic) },
            };
            result = result.and(Err(error));
        }
        result
    }
}

impl Drop for Ps {
    fn drop(&mut self) {
        self.handle.suspend();
        // A dropped server has no caller to report a failure to.
        let _ = self.join();
    }
}

impl PsListener {
    /// Starts serving. When this returns, the threads run and workers are answered.
    pub fn start(self, config: PsConfig) -> Result<Ps, StartError> {
        config.check()?;
        let credentials = self.credentials.or(config.credentials.clone());
        let unix_address = self
            .endpoints
            .unix_address()
            .filter(|_| config.sharing_obstacle().is_none())
            .unwrap_or_default();
        let (events, event_readers) = config.events.with_readers();
        let config = Arc::new(PsConfig { unix_address, events, credentials, ..config });
        let writers = config.storage.writers;
        let open = |path| StateDirectory::open_for(path, writers);
        let state = config.storage.directory.as_deref().map(open).transpose()?;
        let arena_storages = (0..config.shards)
            .map(|shard| match &state {
                // Memory with a descriptor costs something: only if it can be shared.
                None if config.unix_address.is_empty() => Ok(ArenaStorage::Anonymous),
                None => Ok(ArenaStorage::Shareable),
                Some(state) => state.shard(shard).map(ArenaStorage::Folder),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let in_memory = |arena_storage: &ArenaStorage| matches!(arena_storage, ArenaStorage::Folder(f) if f.is_in_memory());
        if config.storage.durability == Durability::Power && arena_storages.iter().any(in_memory) {
            let setting = "durability";
            let value = "power".to_owned();
            let reason = "the state directory is on a file system in memory";
            return Err(StartError::Setting { setting, value, reason });
        }
        let counters: Arc<[Arc<Counters>]> =
            arena_storages.iter().map(|_| Arc::default()).collect();
        let identity = Arc::new(config.identity());
        let server_run = server_run();
        let budget = Budget::new(config.storage.limit());
        let mut shards = Vec::new();
        for (index, arena_storage) in arena_storages.into_iter().enumerate() {
            let parts = ShardSetup {
                id: ShardId { task: config.task.index, shard: index as u16 },
                config: config.clone(),
                identity: identity.clone(),
                budget: budget.clone(),
                counters: counters[index].clone(),
            };
            shards.push(open_shard(parts, arena_storage, state.as_ref(), server_run)?);
        }
        let stop = CancellationToken::new();
        let addresses = self.endpoints.addresses().into();
        let ending = Arc::new(ServerEnd::default());
        let saves = config.checkpoints.clone().filter(|_| config.owns_step());
        let claim = match saves.as_ref().map(|checkpoints| checkpoints.storage.claim()) {
            Some(Ok(claim)) => claim,
            Some(Err(source)) if source.source.kind() == io::ErrorKind::WouldBlock => {
                return Err(StartError::CheckpointsInUse { task: config.task.clone(), source });
            }
            // A storage that fails now is reported by the save that meets it.
            Some(Err(_)) | None => StorageClaim::default(),
        };
        let (save_waiters, waiter_receiver) = mpsc::channel(ORDERS_MAX);
        let save_waiters = saves.is_some().then_some(save_waiters);
        let counted = counters.clone();
        let (record, saved) = watch::channel(SaveRecord::default());
        let now = Instant::now();
        let (publishers, statuses): (Vec<_>, Vec<_>) =
            shards.iter().map(|shard| watch::channel(shard.status(now))).unzip();
        let handle = PsHandle {
            addresses,
            stop: stop.clone(),
            ending: ending.clone(),
            counters: counted,
            save_waiters,
            saves: saved,
            statuses: statuses.into(),
            home: HomeProcess::current(),
            event_readers,
        };
        let unequal = [config.fewer_workers(), config.more_workers()];
        for event in unequal.into_iter().flatten().filter(|_| config.owns_step()) {
            config.events.emit(&event);
        }
        let (end, ended) = mpsc::channel(1);
        let note = state.as_ref().map(StateDirectory::save_note);
        let mut ps = Ps { handle, threads: Vec::new(), ended, _state: state, _claim: claim };

        let mut saver = None;
        if let Some(checkpoints) = saves {
            let (order, orders) = mpsc::channel(ORDERS_MAX);
            let (news, saver_events) = mpsc::channel(ORDERS_MAX);
            saver = Some((order, saver_events));
            let abandon_flag = AbandonFlag::default();
            let publisher = Publisher {
                storage: abandon_flag.watch(checkpoints.storage),
                retention: checkpoints.retention,
                peer_hello: PeerHello {
                    task: config.task.clone(),
                    identity: (*identity).clone(),
                    features: config.features,
                    credentials: config.credentials.clone(),
                },
                addresses: peers(&config, ps.handle.address()),
                rules: config.rules.clone(),
                owner: ShardId { task: config.task.index, shard: 0 },
            };
            let saver = Saver {
                publisher: Arc::new(publisher),
                every: checkpoints.every,
                on_failure: checkpoints.on_failure,
                record,
                note,
                events: config.events.clone(),
                counters: counters[0].clone(),
                orders,
                save_waiters: waiter_receiver,
                news,
                abandon_flag,
                stop: stop.clone(),
            };
            ps.spawn(format!("ps-{}-saver", config.task.index), &end, || saver::run(saver))?;
        }
        let mut senders = Vec::new();
        let mut members = Vec::new();
        for (index, (shard, status)) in shards.into_iter().zip(publishers).enumerate() {
            let (sender, arrivals) = mpsc::channel(ARRIVALS_MAX);
            let (member_sender, member_receiver) = watch::channel((0, 0));
            senders.push(sender);
            members.push(member_receiver);
            let stop = stop.clone();
            let config = config.clone();
            let name = format!("ps-{}-shard-{index}", config.task.index);
            let saver = saver.take().filter(|_| index == 0);
            let owner = owner_address(&config, &identity, ps.handle.address(), index as u16);
            let members = member_sender;
            let links = ShardLinks { config, arrivals, members, status, saver, owner };
            let ending = ending.clone();
            ps.spawn(name, &end, move || shard_thread::run(shard, links, &stop, &ending))?;
        }
        let acceptor = Acceptor {
            endpoints: self.endpoints,
            services: self.services,
            shards: senders,
            members,
            limits: AcceptLimits {
                handshake_timeout: config.network.handshake_timeout,
                waiting_connections_max: config.network.waiting_connections_max,
            },
            credentials: config.credentials.clone(),
            events: config.events.clone(),
            counters: counters[0].clone(),
            descriptor_watch: DescriptorWatch::new(config.events.clone(), counters[0].clone()),
            exit_when_done: config.exit_when_done,
            stop,
            ending,
        };
        ps.spawn(format!("ps-{}-accept", config.task.index), &end, || accept::run(acceptor))?;
        Ok(ps)
    }
}

impl Ps {
    /// Starts a thread that stops the other threads when it ends for any reason.
    fn spawn(
        &mut self,
        name: String,
        end: &mpsc::Sender<()>,
        run: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<(), StartError> {
        let stop = self.handle.stop.clone().drop_guard();
        let end = end.clone();
        let ending = self.handle.ending.clone();
        let thread = std::thread::Builder::new().name(name.clone()).spawn(move || {
            let _end = end;
            let _stop = stop;
            catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
                // Nobody continues with this server: its clients hear so from every shard.
                ending.is_final.store(true, Ordering::Relaxed);
                resume_unwind(panic)
            })
        });
        match thread {
            Ok(handle) => {
                self.threads.push((name, handle));
                Ok(())
            }
            Err(source) => Err(StartError::Thread { thread: name, source }),
        }
    }
}

/// Opens a shard. A state from before a reboot is set aside if checkpoints are configured, because
/// one can be restored.
fn open_shard(
    parts: ShardSetup,
    arena_storage: ArenaStorage,
    state: Option<&StateDirectory>,
    server_run: ServerRun,
) -> Result<Shard, StorageError> {
    let retry = parts.clone();
    let opened = Shard::open(parts, arena_storage, server_run, Instant::now());
    match (opened, state) {
        (Err(StorageError::OtherBoot { .. }), Some(state))
            if retry.config.checkpoints.is_some() =>
        {
            let shard = retry.id.shard;
            state.set_aside(shard)?;
            let arena_storage = ArenaStorage::Folder(state.shard(shard)?);
            Shard::open(retry, arena_storage, server_run, Instant::now())
        }
        (opened, _) => opened,
    }
}

/// Returns the address of the step owner; `None` for the step owner itself.
fn owner_address(
    config: &PsConfig,
    identity: &Identity,
    own: &str,
    shard: u16,
) -> Option<OwnerAddress> {
    let owner = config.cluster.step_owner().filter(|_| !(config.owns_step() && shard == 0))?;
    Some(OwnerAddress {
        peer_hello: PeerHello {
            task: config.task.clone(),
            identity: identity.clone(),
            features: config.features,
            credentials: config.credentials.clone(),
        },
        address: peers(config, own).get(&owner.index)?.clone(),
        shard: ShardId { task: owner.index, shard: 0 },
        own: ShardId { task: config.task.index, shard },
        lease: config.lease,
    })
}

/// Returns the addresses of the ps tasks; for this task, where it listens.
fn peers(config: &PsConfig, own: &str) -> BTreeMap<u32, String> {
    let addresses = config.cluster.ps_tasks().map(|(index, address)| {
        let own = (index == config.task.index).then_some(own);
        (index, own.unwrap_or(address).to_owned())
    });
    addresses.collect()
}

/// Returns the boot, arena number and epoch base of this run of the server.
fn server_run() -> ServerRun {
    // The time serves only as a number that is higher in each run of the server.
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let epoch_base = u64::try_from(since.as_millis()).unwrap_or(0);
    // The standard library seeds the keys of `RandomState` from the system's random numbers.
    let arena = RandomState::new().build_hasher().finish();
    ServerRun { boot: boot(), arena, epoch_base }
}

/// Returns the boot id of this machine; zeros if the system has none.
pub(crate) fn boot() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pushpull_checkpoint::LocalDirectory;
    use pushpull_common::cluster::ClusterSpec;
    use pushpull_common::ids::TaskId;
    use pushpull_optim::optimizer::Sgd;

    use super::*;
    use crate::config::{Checkpoints, Storage};
    use crate::shard::ShardInput;
    use crate::shard::output::ShardOutput;

    #[test]
    fn a_state_of_another_boot_is_refused_or_set_aside_for_a_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(folder.path()).unwrap();
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
        let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0));
        let open = |config: PsConfig, boot: u8| {
            let parts = ShardSetup {
                id: ShardId { task: 0, shard: 0 },
                config: Arc::new(config),
                identity: Arc::new(Identity::new().with("ps", "0")),
                budget: Budget::new(1 << 20),
                counters: Arc::default(),
            };
            let server_run = ServerRun { boot: [boot; 16], arena: u64::from(boot), epoch_base: 0 };
            let arena_storage = ArenaStorage::Folder(state.shard(0).unwrap());
            open_shard(parts, arena_storage, Some(&state), server_run)
        };
        open(config.clone(), 1).unwrap();
        open(config.clone(), 1).unwrap();
        let error = open(config.clone(), 2).unwrap_err();
        assert!(matches!(error, StorageError::OtherBoot { .. }), "{error}");
        let storage = LocalDirectory::create(folder.path().join("checkpoints")).unwrap();
        let config = config.checkpoints(Checkpoints::new(storage));
        for boot in 2..4 {
            open(config.clone(), boot).unwrap();
            assert!(folder.path().join("shard-0.aside/control").exists());
        }
    }

    #[test]
    fn a_state_whose_flush_failed_is_refused_and_not_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(folder.path()).unwrap();
        let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
        let storage = LocalDirectory::create(folder.path().join("checkpoints")).unwrap();
        let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(1.0));
        let config = config.checkpoints(Checkpoints::new(storage));
        let open = |durability| {
            let parts = ShardSetup {
                id: ShardId { task: 0, shard: 0 },
                config: Arc::new(config.clone().storage(Storage::memory().durability(durability))),
                identity: Arc::new(Identity::new().with("ps", "0")),
                budget: Budget::new(1 << 20),
                counters: Arc::default(),
            };
            let arena_storage = ArenaStorage::Folder(state.shard(0).unwrap());
            open_shard(parts, arena_storage, Some(&state), server_run())
        };
        let mut shard = open(Durability::Power).unwrap();
        shard.handle(Instant::now(), ShardInput::Tick);
        assert!(
            std::iter::from_fn(|| shard.poll_output()).any(|o| matches!(o, ShardOutput::Flush(_)))
        );
        shard.handle(Instant::now(), ShardInput::Flushed(Err("the disk is gone".to_owned())));
        drop(shard);
        for durability in [Durability::Power, Durability::Process] {
            let error = open(durability).unwrap_err();
            assert!(matches!(error, StorageError::Poisoned { .. }), "{error}");
        }
        assert!(!folder.path().join("shard-0.aside").exists());
        let found = crate::inspect::inspect(folder.path()).unwrap();
        assert_eq!(found.shards[0].poisoned.as_deref(), Some("the disk is gone"));
        assert!(!found.is_sound());
    }
}
