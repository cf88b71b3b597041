"""From a job and a site to a batch script.

job         what to run: recipe and overrides, nodes, ranks per node, time
site        one cluster as data: account, partition, GPUs, launcher, modules, folders; load(name)
site_yaml   a profile's YAML, with the line of whatever is wrong
render      render(job, site): the options and the command, put into `templates/`
hand_down   what stands between SLURM and the ranks; `python -m labcode.slurm.hand_down` prints it
quote       any text as one word of bash, or as one value of an #SBATCH line
"""
