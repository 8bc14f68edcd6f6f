//! [`FunctionPool`]: the threads of blocking functions.

use std::io;
#[cfg(test)]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

/// A job for a thread of the pool. It gets the reason if there is no thread for it.
pub(crate) type Job = Box<dyn FnOnce(Result<(), NoThread>) + Send>;

/// The reason why a job has no thread.
#[derive(Debug)]
pub(crate) enum NoThread {
    /// The pool has ended, with its server.
    Ended,
    /// The operating system refused to start one.
    Refused(io::Error),
}

/// The time after which a thread without a job ends, unless few are free.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// The threads on which blocking functions run. They are started as they are needed. One that is
/// free for 10 s ends, unless the pool keeps it.
///
/// The service of a server limits how many functions run at once, so jobs do not wait here. When a
/// function has passed its deadline, another thread takes the place of its thread.
///
/// Invariant: `idle` is the number of free threads without those that a job in the queue is for.
#[derive(Debug)]
pub(crate) struct FunctionPool {
    name: String,
    jobs: Mutex<Option<Sender<Job>>>,
    queue: Receiver<Job>,
    idle: Arc<AtomicUsize>,
    /// The most free threads that do not end.
    kept: usize,
    idle_time: Duration,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Whether the operating system is taken to have no thread.
    #[cfg(test)]
    refuses: AtomicBool,
}

impl FunctionPool {
    /// Creates a pool that keeps this many free threads.
    pub(crate) fn new(name: String, kept: usize) -> FunctionPool {
        let (jobs, queue) = crossbeam_channel::unbounded();
        FunctionPool {
            name,
            jobs: Mutex::new(Some(jobs)),
            queue,
            idle: Arc::default(),
            kept,
            idle_time: IDLE_TIME,
            threads: Mutex::default(),
            #[cfg(test)]
            refuses: AtomicBool::new(false),
        }
    }

    /// Runs a job on a free thread, or on a new one. Returns a job that has no thread, with the
    /// reason.
    pub(crate) fn run(&self, job: Job) -> Result<(), (Job, NoThread)> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(jobs) = jobs else {
            return Err((job, NoThread::Ended));
        };
        let claimed =
            self.idle.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |idle| idle.checked_sub(1));
        if claimed.is_err()
            && let Err(error) = self.start_thread()
        {
            return Err((job, NoThread::Refused(error)));
        }
        // The pool holds a receiver, so the channel is open.
        let _ = jobs.send(job);
        Ok(())
    }

    fn start_thread(&self) -> io::Result<()> {
        #[cfg(test)]
        if self.refuses.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let queue = self.queue.clone();
        let idle = self.idle.clone();
        let kept = self.kept;
        let idle_time = self.idle_time;
        let run = move || {
            loop {
                match queue.recv_timeout(idle_time) {
                    Ok(job) => {
                        job(Ok(()));
                        idle.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        // It ends only as a free thread: one that a job is for waits for the job.
                        let is_spare = |idle: usize| (idle > kept).then(|| idle - 1);
                        let spare = idle.fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_spare);
                        if spare.is_ok() {
                            return;
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name(self.name.clone()).spawn(run);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        thread.map(|thread| threads.push(thread))
    }

    /// Sets whether the operating system is taken to have no thread.
    #[cfg(test)]
    pub(crate) fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::SeqCst);
    }

    /// Ends the threads that are free, and the others as soon as they are. Waits for them for at
    /// most this time, and returns how many still run.
    pub(crate) fn end(&self, within: Duration) -> usize {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        // A wait beyond the range of the clock has no end.
        let until = Instant::now().checked_add(within);
        let mut running = 0;
        for thread in threads {
            // A thread cannot be joined with a deadline.
            while !thread.is_finished() && until.is_none_or(|until| Instant::now() < until) {
                std::thread::sleep(Duration::from_millis(1));
            }
            match thread.is_finished() {
                true => _ = thread.join(),
                false => running += 1,
            }
        }
        running
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn run(pool: &FunctionPool, job: impl FnOnce() + Send + 'static) {
        let job = Box::new(|thread: Result<(), NoThread>| {
            thread.unwrap();
            job();
        });
        assert!(pool.run(job).is_ok());
    }

    #[test]
    fn threads_are_used_again_and_end() {
        let pool = FunctionPool::new("test".to_owned(), 2);
        let (sender, receiver) = mpsc::channel();
        for round in 0..100 {
            let sender = sender.clone();
            run(&pool, move || sender.send(round).unwrap());
            assert_eq!(receiver.recv().unwrap(), round);
        }
        assert!(pool.threads.lock().unwrap().len() <= 100);
        assert_eq!(pool.end(Duration::from_secs(60)), 0);
        let after = pool.run(Box::new(|_| panic!("a job after the end")));
        assert!(matches!(after, Err((_, NoThread::Ended))));
    }

    #[test]
    fn free_threads_end_but_for_a_few() {
        let idle_time = Duration::from_millis(10);
        let pool = FunctionPool { idle_time, ..FunctionPool::new("test".to_owned(), 2) };
        let (sender, receiver) = mpsc::channel();
        let releases: Vec<mpsc::Sender<()>> = (0..20)
            .map(|_| {
                let (release, held) = mpsc::channel::<()>();
                run(&pool, move || _ = held.recv());
                release
            })
            .collect();
        assert_eq!(pool.threads.lock().unwrap().len(), 20);
        drop(releases);
        let begun = Instant::now();
        let live = || {
            let threads = pool.threads.lock().unwrap();
            threads.iter().filter(|thread| !thread.is_finished()).count()
        };
        while live() > 2 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{} threads are left", live());
            std::thread::yield_now();
        }
        // Jobs run on those that are left, and on new ones.
        for round in 0..100 {
            let sender = sender.clone();
            run(&pool, move || sender.send(round).unwrap());
        }
        let mut rounds: Vec<i32> = receiver.iter().take(100).collect();
        rounds.sort_unstable();
        assert!(rounds.into_iter().eq(0..100));
        assert_eq!(pool.end(Duration::from_secs(60)), 0);
    }

    #[test]
    fn a_function_that_does_not_return_keeps_no_other_out() {
        let pool = FunctionPool::new("test".to_owned(), 2);
        let (release, stuck) = mpsc::channel::<()>();
        run(&pool, move || _ = stuck.recv());
        let (sender, receiver) = mpsc::channel();
        run(&pool, move || sender.send(7).unwrap());
        assert_eq!(receiver.recv(), Ok(7));
        assert_eq!(pool.end(Duration::ZERO).min(1), 1, "the stuck thread runs on");
        drop(release);
    }
}
