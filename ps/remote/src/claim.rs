//! The claim of a cluster to save at a URL, as a lease.
//!
//! A claim is an object with a number. The highest number holds. A process takes over by creating
//! the next number, which of several processes one can: every storage creates a file only if it is
//! absent, and HDFS has no other conditional operation. The holder renews its claim by writing a new
//! text. A process that finds a claim takes over at once if the holder was a process of this machine
//! and has ended, or if the text does not change for a whole lease. No clocks are compared.
//!
//! A holder that was suspended for longer than its lease finds a higher number, or its own gone,
//! before its next change. A request that it had sent before may still arrive; the folders of a
//! checkpoint have names of their own for each save, so that it cannot harm another one.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::backend::Backend;
use crate::fault::StoreError;
use crate::objects::random_id;
use crate::process_mark::ProcessMark;
use crate::store_threads::StoreThreads;

/// The text of a claim.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ClaimText {
    /// The identifier of the holder.
    id: String,
    /// Counts the renewals.
    renewals: u64,
    /// The holder's process, if it can be told.
    process: Option<ProcessMark>,
}

impl ClaimText {
    fn to_bytes(&self) -> Bytes {
        let text = serde_json::to_vec(self).expect("strings and numbers have a JSON form");
        Bytes::from(text)
    }
}

/// A held claim. It is renewed until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    threads: Arc<StoreThreads>,
    renewal: JoinHandle<()>,
    holder: Arc<Holder>,
}

/// The holder of a claim, as the storage that it belongs to asks it.
#[derive(Debug)]
pub(crate) struct Holder {
    backend: Backend,
    number: u64,
    lease: Duration,
    text: tokio::sync::Mutex<ClaimText>,
    state: Mutex<HolderState>,
}

#[derive(Debug)]
struct HolderState {
    /// When the last renewal began that succeeded.
    renewed: Instant,
    /// The reason why the claim is lost.
    lost: Option<&'static str>,
}

/// The most claims that vanish while one is taken.
const ATTEMPTS_MAX: usize = 8;

/// The longest time that a dropped claim waits until it is removed. A claim that stays is taken over
/// as that of an ended process.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

impl Claim {
    /// Takes the claim. Fails with `WouldBlock` if another process holds it.
    pub(crate) fn take(
        threads: Arc<StoreThreads>,
        backend: Backend,
        lease: Duration,
        operation_timeout: Duration,
    ) -> Result<Claim, StoreError> {
        // It watches the text of another holder for one lease, or twice if it vanishes.
        let limit = operation_timeout + lease * 3;
        let holder = threads.wait(limit, Holder::take(backend, lease))?;
        let holder = Arc::new(holder);
        let renewing = holder.clone();
        let renewal = threads.handle().spawn(async move {
            while !renewing.is_lost() {
                tokio::time::sleep(renewing.lease / 3).await;
                // What fails or hangs now is tried again, and before the next change at the latest.
                let _ = tokio::time::timeout(renewing.lease, renewing.renew()).await;
            }
        });
        Ok(Claim { threads, renewal, holder })
    }

    pub(crate) fn holder(&self) -> &Arc<Holder> {
        &self.holder
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.renewal.abort();
        if self.holder.is_lost() {
            return;
        }
        let holder = self.holder.clone();
        let _ = self.threads.wait(RELEASE_WAIT, async move {
            // Not while a renewal is under way, which would write the claim again.
            let _text = holder.text.lock().await;
            holder.backend.remove_claim(holder.number).await
        });
    }
}

impl Holder {
    async fn take(backend: Backend, lease: Duration) -> Result<Holder, StoreError> {
        let taken = || StoreError::new(io::ErrorKind::WouldBlock, TAKEN);
        for _ in 0..ATTEMPTS_MAX {
            let found = backend.claims().await?;
            let highest = found.last().copied();
            if let Some(number) = highest {
                match watch(&backend, number, lease).await? {
                    Watched::Abandoned => {}
                    Watched::Renewed => return Err(taken()),
                    Watched::Removed => continue,
                }
            }
            let number = highest.unwrap_or(0).saturating_add(1);
            let process = ProcessMark::current();
            let text = ClaimText { id: random_id(), renewals: 0, process };
            let renewed = Instant::now();
            match backend.create_claim(number, text.to_bytes()).await {
                Ok(()) => {}
                Err(error) if error.kind == io::ErrorKind::AlreadyExists => return Err(taken()),
                Err(error) => return Err(error),
            }
            // Another process may have taken a higher number and removed the one that was seen here.
            let claims = backend.claims().await?;
            if claims.last().is_some_and(|last| *last > number) {
                backend.remove_claim(number).await?;
                return Err(taken());
            }
            for old in claims.into_iter().filter(|old| *old < number) {
                backend.remove_claim(old).await?;
            }
            let text = tokio::sync::Mutex::new(text);
            let state = Mutex::new(HolderState { renewed, lost: None });
            return Ok(Holder { backend, number, lease, text, state });
        }
        Err(taken())
    }

    /// Fails if the claim is lost. Renews it first if its lease may have passed.
    pub(crate) async fn check(&self) -> Result<(), StoreError> {
        if !self.is_lost() && self.state().renewed.elapsed() > self.lease {
            self.renew().await?;
        }
        match self.state().lost {
            None => Ok(()),
            Some(reason) => Err(StoreError::new(io::ErrorKind::WouldBlock, reason)),
        }
    }

    fn is_lost(&self) -> bool {
        self.state().lost.is_some()
    }

    async fn renew(&self) -> Result<(), StoreError> {
        let mut text = self.text.lock().await;
        if self.is_lost() {
            return Ok(());
        }
        let renewed = Instant::now();
        let is_held = match self.backend.read_claim(self.number).await {
            Ok(found) => serde_json::from_slice::<ClaimText>(&found)
                // The text of a renewal that was cut short is of nobody else.
                .map_or(true, |found| found.id == text.id),
            Err(error) if error.is_not_found() => false,
            Err(error) => return Err(error),
        };
        let claims = self.backend.claims().await?;
        if !is_held || claims.last().is_some_and(|last| *last > self.number) {
            self.state().lost = Some(LOST);
            return Ok(());
        }
        text.renewals += 1;
        self.backend.write_claim(self.number, text.to_bytes()).await?;
        self.state().renewed = renewed;
        Ok(())
    }

    fn state(&self) -> std::sync::MutexGuard<'_, HolderState> {
        // Each field is set by one assignment, so a panic leaves none half set.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fate of the claim of another process while it was watched.
enum Watched {
    Abandoned,
    Renewed,
    Removed,
}

/// Watches a claim until it is renewed or removed, or its lease has passed.
async fn watch(backend: &Backend, number: u64, lease: Duration) -> Result<Watched, StoreError> {
    let mut first = None;
    let started = Instant::now();
    loop {
        let text = match backend.read_claim(number).await {
            Err(error) if error.is_not_found() => return Ok(Watched::Removed),
            text => text?,
        };
        let holder: Option<ClaimText> = serde_json::from_slice(&text).ok();
        if holder.and_then(|holder| holder.process).is_some_and(|process| process.has_ended()) {
            return Ok(Watched::Abandoned);
        }
        match &first {
            None => first = Some(text),
            Some(first) if *first != text => return Ok(Watched::Renewed),
            Some(_) if started.elapsed() > lease => return Ok(Watched::Abandoned),
            Some(_) => {}
        }
        tokio::time::sleep(lease / 8).await;
    }
}

const TAKEN: &str = "another cluster saves its checkpoints there";
const LOST: &str = "another cluster has taken over the claim to save there";
