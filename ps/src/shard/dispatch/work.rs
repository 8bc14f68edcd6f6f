//! Work: slices of updates and other jobs, and their ends.

use std::time::Instant;

use pushpull_store::change::Stalled;

use crate::inbox::Inbox;
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::steps::to_owner::AppliedGradients;
use crate::shard::values::applier::{ShardJob, WorkOutcome};
use crate::shard::values::push_job::PushJob;
use crate::shard::values::variables::Variables;

impl Shard {
    /// Does a slice of the front job.
    pub(crate) fn work(&mut self, now: Instant) -> WorkOutcome {
        self.persist_late();
        if self.applier.awaits_growth(now) {
            return WorkOutcome::Growing;
        }
        let Some(mut job) = self.applier.jobs.pop_front() else {
            return WorkOutcome::Idle;
        };
        if job.unbegun().is_some_and(|push_slot| self.drop_if_over(now, push_slot)) {
            return self.job_done(now, Changes::ALL);
        }
        match self.slice(&mut job) {
            Err(Stalled::Growth(error)) => {
                self.applier.jobs.push_front(job);
                return self.applier.growth_failed(&mut self.out, now, &error);
            }
            Err(Stalled::NoFreeBlock) => {
                self.applier.jobs.push_front(job);
                if self.waits_for_image() {
                    // Blocks become free when the image is on the disk; no reader is at fault.
                    return WorkOutcome::Flushing;
                }
                // Training has priority over a checkpoint that pins more than the pin budget.
                self.checkpoints.release_checkpoint_pins();
                return WorkOutcome::Blocked;
            }
            Ok(false) => {
                self.applier.jobs.push_front(job);
                self.applier.growth_succeeded(&mut self.out, now);
            }
            Ok(true) => {
                self.applier.growth_succeeded(&mut self.out, now);
                return self.end_job(now, job);
            }
        }
        WorkOutcome::More
    }

    fn slice(&mut self, job: &mut ShardJob) -> Result<bool, Stalled> {
        let Shard { applier, intake, variables, steps, files, .. } = self;
        let inbox: Option<&Inbox> = intake.inbox.as_ref();
        let made_step = |variables: &Variables, named| {
            let applied = AppliedGradients {
                epoch: variables.epoch,
                restored_step: variables.restored_step,
                gradients: variables.gradients,
            };
            steps.made_step(applied, named)
        };
        let tokens = steps.asynchronous_tokens();
        applier.slice(job, inbox, variables, tokens, made_step, &mut files.journal)
    }

    /// Ends a job that is done.
    fn end_job(&mut self, now: Instant, job: ShardJob) -> WorkOutcome {
        let mut changes = Changes::ALL;
        match job {
            ShardJob::Push(PushJob { push_slot, refusal: Some(refusal), .. }) => {
                self.refuse_whole(push_slot, refusal);
            }
            ShardJob::Push(push) => changes = self.push_applied(now, push),
            ShardJob::Step(step) => {
                self.applier.end_update();
                self.step_applied(now, &step.push_slots);
            }
            ShardJob::Scan(scan) => {
                if self.scan_done(now, scan) {
                    // A small push is applied in the slice in which it arrives.
                    return self.work(now);
                }
            }
            ShardJob::Norm(norm) => self.norm_done(&norm),
            ShardJob::Initialize(job) => self.initialized(job.connection, job.request, job.epoch),
        }
        self.job_done(now, changes)
    }

    /// Commits the changes of a job, before its outputs are sent.
    fn job_done(&mut self, now: Instant, changes: Changes) -> WorkOutcome {
        self.follow_up(now, changes);
        if self.applier.has_work() { WorkOutcome::More } else { WorkOutcome::Idle }
    }
}
